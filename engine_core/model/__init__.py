"""The model: description, checkpoint, decoder, runner, sampler."""
