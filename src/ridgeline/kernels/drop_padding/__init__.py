"""Copy the rows of a padded matrix into a contiguous one."""
