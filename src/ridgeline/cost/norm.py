DEFAULTS={}
def kernels(*a): return []
