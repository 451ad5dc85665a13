"""The options of the smallest run."""

# A whole run in about a second: four updates per epoch of the smallest network on 16 x 16 noise.
TINY = (
    "--data generated --image-size 16 --iterations 4 --micro-batch-size 8 --epoch 2 --warmup-epoch 0 --threads 1"
    " --dataloader-workers 1 --device cpu"
)
