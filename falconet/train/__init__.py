"""What happens in a run, read top to bottom: run, phase, plan, build, loop, step, evaluate, log, save."""
