"""A run that is about to start, and its first phase, from a line as a command reads it."""

from falconet.config.commands import TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import load
from falconet.config.settings import from_line
from falconet.train.build import BuiltPhase, open_site
from falconet.train.preparation import prepare


def launched(line):
    return prepare(load(TrainOptions, from_line(line.split(), options_of(TrainOptions))))


def built(line):
    launch = launched(line)
    return BuiltPhase(launch, open_site(launch))
