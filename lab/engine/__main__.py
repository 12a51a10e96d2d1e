from lab.driver import run

run(__package__)
