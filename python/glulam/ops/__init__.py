"""The operators, a file each: the public function, the meaning of its arguments and its plan."""
