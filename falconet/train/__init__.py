"""One phase of training: the plan, the step, the loop, the evaluation, the record of it."""
