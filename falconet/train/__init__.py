"""The plan, the step, the loop, the evaluation."""
