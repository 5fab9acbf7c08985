"""How good the features are while the backbone is being pretrained, without training noticing.

Features come from the backbone in evaluation mode, without a graph: no gradient reaches it, running statistics stay.
Orders and splits are drawn from counters, not from a process's generator: no later draw moves.
"""

from dali.sources import Source
from pipeline import knn, linear_heads
from pipeline.features import extract
from pipeline.scores import to_count
from pipeline.training import Run

WORDS = {"knn_accuracy": "kNN accuracy", "probe_accuracy": "linear probe"}


def judge(run: Run, test: Source) -> dict[str, float]:
    """Per cent of the test images named rightly: `knn_accuracy` and, with `knn.linear_probe`, `probe_accuracy`.

    Bank and test images are embedded once for both. All workers call this alike.
    """
    config, world, device = run.config, run.world, run.device
    assert test.classes is not None
    num_classes, num_test = len(test.classes), to_count(test)
    chosen = knn.bank_indices(config, len(run.source))
    bank, queries = (
        extract(run.model.backbone, source, config, world.shard, device, run.threads, indices)
        for source, indices in ((run.source, chosen), (test, None))
    )
    near = knn.judge(bank.of_unit_length(), queries.of_unit_length(), num_test, num_classes, config, world, device)
    found = {"knn_accuracy": near.top1}
    if config.knn.linear_probe:
        outcome = linear_heads.fit_and_judge(
            bank, queries, num_test, num_classes, config.probe, config.seed, world, device
        )
        found["probe_accuracy"] = outcome.scores.top1
    return found
