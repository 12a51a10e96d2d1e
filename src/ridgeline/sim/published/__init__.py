"""Files of published results, judged row by row: one module a file, each turning rows into predictions."""
