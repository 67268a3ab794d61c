"""Compile chains: exported C functions that call several stages in turn, generated when a bundle is linked.

A stage is a function that is compiled on its own; a step is one call of a stage by a chain. For each step, a table says
where the stage's arguments come from: the chain's TVM-FFI arguments, properties of the chain's tensors, or constants.
Stages check their arguments, so the chain does not, and no name is looked up during a call: a step adds some 10 ns.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from cute_kernels.arguments import FLOAT32, Argument
from cute_kernels.chains import Chain, Of, Position, Source, Step, chain_of, signature_of
from cute_kernels.specs import Spec

from . import host, toolchain
from .errors import CompileError

FILE = "chains.c"
# No path and no date in the object.
_FLAGS = ("-O2", "-fPIC", "-g0", "-fvisibility=hidden", "-std=c11")

_RUN = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#define EXPORT __attribute__((visibility("default")))

typedef int (*Stage)(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
enum { ARGUMENT, INTEGER, FLOAT, ADDRESS, SIZE, STRIDE, STREAM, POSITION };
/* index: of the chain's argument. value: a constant, or a dimension. */
typedef struct { uint8_t kind; uint8_t index; int32_t value; } Source;
/* when: the argument that must not be 0; -1: none. */
typedef struct { Stage stage; const Source* sources; int16_t count; int16_t when; } Step;
typedef struct { const char* name; const Step* steps; int32_t count; int32_t num_arguments; } Chain;

static int refuse(const Chain* chain, const char* what, int32_t number) {
  char message[512];
  snprintf(message, sizeof message, "%s: %s %d", chain->name, what, (int)number);
  TVMFFIErrorSetRaisedFromCStr("TypeError", message);
  return -1;
}

static const DLTensor* tensor_in(const TVMFFIAny* value) {
  if (value->type_index == kTVMFFIDLTensorPtr) return (const DLTensor*)value->v_ptr;
  if (value->type_index == kTVMFFITensor) return (const DLTensor*)((const char*)value->v_obj + sizeof(TVMFFIObject));
  return NULL;
}

static int64_t stride_of(const DLTensor* tensor, int32_t dim) {
  if (tensor->strides != NULL) return tensor->strides[dim];
  int64_t stride = 1;
  for (int32_t i = tensor->ndim - 1; i > dim; i--) stride *= tensor->shape[i];
  return stride;
}

/* position: how many steps were taken before. */
static int take(const Chain* chain, const TVMFFIAny* arguments, int64_t position, const Source* source,
                TVMFFIAny* value) {
  if (source->kind == ARGUMENT) {
    *value = arguments[source->index];
    return 0;
  }
  value->zero_padding = 0;
  if (source->kind == FLOAT) {
    value->type_index = kTVMFFIFloat;
    value->v_float64 = source->value;
    return 0;
  }
  value->type_index = kTVMFFIInt;
  if (source->kind == INTEGER || source->kind == POSITION) {
    value->v_int64 = source->kind == INTEGER ? source->value : position;
    return 0;
  }
  const DLTensor* tensor = tensor_in(&arguments[source->index]);
  if (tensor == NULL || ((source->kind == SIZE || source->kind == STRIDE) && source->value >= tensor->ndim))
    return refuse(chain, "a tensor is wanted as argument", source->index);
  if (source->kind == ADDRESS)
    value->v_int64 = (int64_t)((const char*)tensor->data + tensor->byte_offset);
  else if (source->kind == STREAM)
    value->v_int64 = (int64_t)TVMFFIEnvGetStream(tensor->device.device_type, tensor->device.device_id);
  else
    value->v_int64 = source->kind == SIZE ? tensor->shape[source->value] : stride_of(tensor, source->value);
  return 0;
}

static int run(const Chain* chain, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  if (count != chain->num_arguments) return refuse(chain, "other number of arguments than", chain->num_arguments);
  int64_t position = 0;
  for (int32_t i = 0; i < chain->count; i++) {
    const Step* step = &chain->steps[i];
    if (step->when >= 0 && arguments[step->when].v_int64 == 0) continue;
    TVMFFIAny values[MOST];
    for (int32_t j = 0; j < step->count; j++)
      if (take(chain, arguments, position, &step->sources[j], &values[j]) != 0) return -1;
    if (step->stage(NULL, values, step->count, result) != 0) return -1;
    position++;
  }
  return 0;
}
"""


def symbol(name: str) -> str:
    """Return the symbol of an exported function in TVM-FFI's naming."""
    return f"__tvm_ffi_{name}"


def _source(names: Sequence[str], argument: Argument, source: Source) -> str:
    """Return the C initialiser of a `Source`: where a stage's argument comes from.

    Args:
        names: names of the chain's arguments.
        argument: the stage's argument.
        source: a name of the chain's arguments, a property `Of` one of its tensors, the step's `Position`, or a number.
    """
    if isinstance(source, str):
        return f"{{ARGUMENT, {names.index(source)}, 0}}"
    if isinstance(source, Position):
        return "{POSITION, 0, 0}"
    if isinstance(source, Of):
        return f"{{{source.what.upper()}, {names.index(source.tensor)}, {source.dim}}}"
    return f"{{{'FLOAT' if argument.kind == FLOAT32 else 'INTEGER'}, 0, {source}}}"


def _sources(names: Sequence[str], step: Step) -> str:
    """Return the C initialisers for all arguments of a step's stage. `names`: names of the chain's arguments."""
    signature = signature_of(step.stage)
    given = signature.ordered(dict(step.sources), lambda zero: 0)
    return ", ".join(_source(names, *pair) for pair in zip(signature.arguments, given, strict=True))


def _chain(name: str, chain: Chain) -> str:
    """Return the C tables and the C function of one chain."""
    names = chain.signature.names
    lines, steps = [], []
    for number, step in enumerate(chain.steps):
        lines.append(f"static const Source {name}_{number}[] = {{{_sources(names, step)}}};")
        when = names.index(step.when) if step.when else -1
        count = len(signature_of(step.stage).arguments)
        steps.append(f"{{{symbol(step.stage.name)}, {name}_{number}, {count}, {when}}}")
    return "\n".join(
        [
            *lines,
            f"static const Step {name}_steps[] = {{{', '.join(steps)}}};",
            f'static const Chain {name} = {{"{name}", {name}_steps, {len(steps)}, {len(names)}}};',
            f"EXPORT int {symbol(name)}(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {{",
            "  (void)self;",
            f"  return run(&{name}, arguments, count, result);",
            "}",
        ]
    )


def text_of(specs: Iterable[Spec]) -> str:
    """Return the C source of all chains among `specs`, in the order of their names; empty if no spec is a chain."""
    chains = {spec.name: chain for spec in specs if (chain := chain_of(spec))}
    if not chains:
        return ""
    stages = {step.stage.name: signature_of(step.stage) for chain in chains.values() for step in chain.steps}
    most = max(len(signature.arguments) for signature in stages.values())
    declared = [f"int {symbol(name)}(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);" for name in sorted(stages)]
    functions = [_chain(name, chain) for name, chain in sorted(chains.items())]
    return "\n".join([f"#define MOST {most}", _RUN, *declared, "", *functions, ""])


def compile_chains(specs: Iterable[Spec], folder: Path, machine: host.Host) -> list[Path]:
    """Compile the chains among `specs` to one object file in `folder`.

    Args:
        specs: specs, of which some may be chains.
        folder: an existing folder.
        machine: the CPUs for which code is made.

    Returns:
        The object file as a list; empty if no spec is a chain.

    Raises:
        CompileError: the C compiler failed; the message has its output.
        ToolchainError: there is no C compiler, or TVM-FFI is not installed.
    """
    text = text_of(specs)
    if not text:
        return []
    source = folder / FILE
    source.write_text(text)
    # The source is named relative to the folder, so that no path of this machine gets into the object.
    command = [*toolchain.c_compiler(machine), f"-march={machine.baseline}", *_FLAGS]
    command += [f"-I{toolchain.tvm_ffi_headers()}", "-c", FILE, "-o", "chains.o"]
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, errors="backslashreplace", env=environment
    )
    if done.returncode:
        raise CompileError(f"compiling {FILE} failed:\n{done.stderr.strip()}")
    return [folder / "chains.o"]
