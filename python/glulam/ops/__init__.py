"""The operators, one file each: the public function, the checks of its arguments, and the definition of its kernel
call.
"""
