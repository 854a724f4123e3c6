#!/usr/bin/env bash
# Turns a folder of pictures, and a CSV file with captions for some of them, into a search page:
#
#     bash examples/picture_folder.sh PICTURES captions.csv "a red car" runs/pictures
#
# The CSV file has the columns file (a path below PICTURES) and caption. Arguments after the fourth are
# passed to experiments.main, such as --config.train.steps=500. Running the command again resumes it.
# It needs pip install -e '.[experiments,extract]'.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: bash $0 PICTURES CAPTIONS.csv QUERY [OUT] [OPTION...]" >&2
    exit 1
elif [ ! -d "$1" ] || [ ! -f "$2" ]; then
    echo "$0: PICTURES must be a folder and CAPTIONS.csv a file, got $1 and $2" >&2
    exit 1
fi
mkdir -p "${4:-runs/pictures}"
pictures=$(realpath "$1") captions=$(realpath "$2") query=$3 out=$(realpath "${4:-runs/pictures}")
cd "$(dirname "$0")/.."

# Embed the captions first, because this is fast and finds wrong paths. Then embed all pictures.
python -m sotalign_jax.extract --encoder=all-minilm-l6-v2 --data=folder --root="$pictures" \
    --captions="$captions" --workdir="$out/all-minilm-l6-v2"
python -m sotalign_jax.extract --encoder=efficientnet-lite2 --data=folder --root="$pictures" \
    --workdir="$out/efficientnet-lite2"

# Pair the rows. Pictures without a caption become unpaired rows.
python -m sotalign_jax.pair --x="$out/efficientnet-lite2" --y="$out/all-minilm-l6-v2" --workdir="$out/files"

# Train CCA, SAIL, SOTAlign and align, and write $out/run/report.html.
python -m experiments.main --config=experiments/configs/files.py:from="$out/files" --workdir="$out/run" "${@:5}"

# Search all pictures with their stored embeddings.
python -m sotalign_jax.search --model="$out/run/align-seed0" --query="$query" --images="$pictures" \
    --index="$out/efficientnet-lite2" --page="$out/found.html"

# `python -m sotalign_jax.serve` serves a live page with the same flags, see docs/search.md.
