"""The operators, a file each: the public function, its arguments' meaning and its plan."""
