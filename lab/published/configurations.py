"""The configuration of each row at its full depth and batch, configs/published/ID.yaml.

    python -m lab.published.configurations      writes the files

They train with `pretrain_gpt.py` as any other configuration does, once `data.path` names a data set.
"""

import yaml

from lab.published.row_settings import settings_tree
from lab.published.rows import ROWS, Row, read_rows


def configuration(row: Row) -> str:
    tree = settings_tree(row)
    tree["run"] = {"dir": f"runs/published/{row.id}"}
    title = f"# {row.source}: {row.published_tflops:g} TFLOPs a GPU ({row.basis}) on {row.gpus} {row.gpu}\n"
    return title + yaml.safe_dump(tree, sort_keys=False)


def main() -> None:
    for row in read_rows():
        (ROWS.parent / f"{row.id}.yaml").write_text(configuration(row))


if __name__ == "__main__":
    main()
