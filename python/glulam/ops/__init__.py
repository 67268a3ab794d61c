"""The operators, one file each: the public function, the checks of its arguments, and its kernel call's definition."""
