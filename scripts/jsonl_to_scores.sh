#!/usr/bin/env bash
# Walks from JSON lines, some of them broken, to scores of lm-evaluation-harness, on two cores in minutes; the steps are
# those of docs/jsonl_to_scores.md. The first start installs the harness into an environment of its own.
#
#   scripts/jsonl_to_scores.sh [FOLDER]      # runs/walk by default; made anew if it is of an earlier walk
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-runs/walk}
mark=$folder/.made_by_jsonl_to_scores
if [[ ! -e $mark && -n $(ls -A "$folder" 2>/dev/null) ]]; then
    echo "jsonl_to_scores.sh: FOLDER=$folder holds files that no walk has made; choose a new folder" >&2 && exit 2
fi
source scripts/setup.sh
rm -rf "$folder" && mkdir -p "$folder" && touch "$mark"
export OMP_NUM_THREADS=1

echo "== texts: the standard library and the documents of this project, with broken lines, and questions about them"
python - "$folder" <<'END'
import json, pathlib, random, sys, sysconfig

folder, choose = pathlib.Path(sys.argv[1]), random.Random(1)
code = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
texts = {"code": code, "prose": sorted(pathlib.Path("docs").rglob("*.md"))}
for name, paths in texts.items():
    lines = [json.dumps({"text": path.read_text(errors="replace")}) for path in paths]
    broken = ['{"text": "cut', '{"title": "no text"}', '{"text": null}', ""]
    (folder / f"{name}.jsonl").write_text("\n".join(lines[:5] + broken + lines[5:]) + "\n")
words = [word for path in texts["prose"] for word in path.read_text().split() if word.isalpha()]
with open(folder / "words.jsonl", "w") as last_words, open(folder / "endings.jsonl", "w") as endings:
    for first in range(0, 200 * 40, 40):
        context, answer = words[first : first + 20], words[first + 20 : first + 24]
        others = [choose.choices(words, k=4) for _ in range(3)]
        last_words.write(json.dumps({"text": " ".join(context)}) + "\n")
        label = choose.randrange(4)
        choices = [" ".join(choice) for choice in others[:label] + [answer] + others[label:]]
        row = {"activity_label": "Text", "ctx_a": " ".join(context), "ctx_b": "", "endings": choices, "label": str(label)}
        endings.write(json.dumps(row) + "\n")
END

echo "== data: a tokenizer of both texts, then two corpora"
prepare() { python -m data.prepare --on_error skip --workers 2 "$@"; }
prepare --source "$folder/code.jsonl" "$folder/prose.jsonl" --train_vocab_size 2048 --tokenizer_only --output "$folder/words"
for name in code prose; do
    prepare --source "$folder/$name.jsonl" --tokenizer "$folder/words" --output "$folder/$name"
done

run=(--config configs/quickstart.yaml --data.path "$folder/code" --data.split '[1, 0, 0]'
    --data.validation "[$folder/code, $folder/prose]" --model.vocab_size 2048 --model.seq_length 128
    --model.num_layers 2 --train.micro_batch_size 4 --train.steps 40 --train.eval_every 20 --checkpoint.every 10
    --train.tasks "[$folder/endings.jsonl, $folder/words.jsonl]" --train.task_questions 50 --run.dir "$folder/run")

echo "== plan: memory and traffic of a rank of four, without them"
python pretrain_gpt.py "${run[@]}" --dry_run.world_size 4

echo "== training: two ranks, which are killed after a checkpoint"
torchrun --standalone --nproc_per_node=2 pretrain_gpt.py "${run[@]}" &
launcher=$!
until [[ -e $folder/run/checkpoints/step-00000010 ]]; do
    kill -0 "$launcher" && sleep 0.2
done
pkill -KILL -P "$launcher"
wait "$launcher" && exit 1

echo "== training: four ranks go on from the checkpoint"
torchrun --standalone --nproc_per_node=4 pretrain_gpt.py "${run[@]}"

echo "== scores: of the exported weights, here and by lm-evaluation-harness"
python -m gpt.checkpoint.export "$folder/run/checkpoints" --output "$folder/weights"
torchrun --standalone --nproc_per_node=2 -m gpt.evaluate "${run[@]}" --tasks "$folder/endings.jsonl" "$folder/words.jsonl" \
    --weights "$folder/weights" --train.task_questions null --train.precision fp32 | tee "$folder/ours.txt"
if [[ ! -e .venv-harness/complete ]]; then
    python -m venv .venv-harness
    python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo .venv-harness/lib/python3*/site-packages)/project.pth"
    .venv-harness/bin/python -m pip install --quiet lm_eval accelerate peft && touch .venv-harness/complete
fi
task() { # NAME, the harness's task
    printf 'include: %s\ntask: %s\ndataset_path: json\ndataset_name: null\ntraining_split: null\n' \
        "$(echo "$PWD"/.venv-harness/lib/python3*/site-packages)/lm_eval/tasks/$2.yaml" "$1" >"$folder/$1.yaml"
    printf 'dataset_kwargs: {data_files: {validation: %s, test: %s}}\n' "$folder/$1.jsonl" "$folder/$1.jsonl" >>"$folder/$1.yaml"
}
task endings hellaswag/hellaswag
task words lambada/lambada_openai
HF_HUB_OFFLINE=1 .venv-harness/bin/lm_eval --model hf --model_args "pretrained=$folder/weights,dtype=float32" --device cpu \
    --tasks endings,words --include_path "$folder" --batch_size 8 --output_path "$folder/harness"
python - "$folder" <<'END'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
(file,) = (folder / "harness").rglob("results_*.json")
theirs, ours = json.loads(file.read_text())["results"], (folder / "ours.txt").read_text()
for task in ("endings", "words"):
    assert f"{task}: accuracy {theirs[task]['acc,none']:.4g}," in ours, (task, theirs[task], ours)
print(f"== equal scores; all files are in {folder}")
END
