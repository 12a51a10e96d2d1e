"""Records of what was predicted and measured, kept so that a later run can be compared with them."""
