r"""Searches pictures by text, or texts by picture, with an aligned model.

    python -m experiments.search --model=RUN --query="a red car" --images=DIR
    python -m experiments.search --model=RUN --query_image=car.jpg --texts=captions.txt

Prints the best and writes them on an HTML page, pictures included. The encoders are those of the
model's training files (of the photographs, if it was trained on them); embeddings of a folder are
kept in --index, so that the next search of it is quick, and made again when its files change.
"""

from absl import flags

from experiments import cli, report
from experiments.cli import path_flag
from experiments.extract import encoders, search
from sotalign_jax import aligner, checks

_MODEL = path_flag("model", None, "Folder of a finished run or saved aligner.", required=True)
_QUERY = flags.DEFINE_string("query", None, "What to look for among --images.")
_IMAGES = path_flag("images", None, "Folder of pictures.")
_PICTURE = path_flag("query_image", None, "Picture to find the texts of.")
_TEXTS = path_flag("texts", None, "Texts to choose from: .txt with one a line, .csv or .jsonl.")
_TOP = flags.DEFINE_integer("top", 10, "How many to show.", 1)
_PAGE = path_flag("page", "search.html", "Where the page is written.")
_INDEX = path_flag("index", None, "Folder for embeddings; MODEL/search by default.")
_ENCODERS, _WEIGHTS = {}, {}
for _side in ("image", "text"):
    _known = [n for n, spec in encoders.NAMES.items() if spec.kind.modality == _side]
    _ENCODERS[_side] = flags.DEFINE_string(
        f"{_side}_encoder", None, f"Instead of the one trained with: {', '.join(_known)}."
    )
    _WEIGHTS[_side] = flags.DEFINE_string(
        f"{_side}_weights", None, "Folder with a copy of that encoder's repository."
    )
_DEVICE = flags.DEFINE_string("device", None, "cpu, cuda, ...; by default the fastest there is.")
_TRUST = flags.DEFINE_bool("trust_remote_code", False, "Run code that comes with the weights.")


def _run() -> None:
    query, images, picture, texts = _QUERY.value, _IMAGES.value, _PICTURE.value, _TEXTS.value
    by_text = query is not None and images is not None
    if not by_text and (picture is None or texts is None):
        raise checks.InputError("query: pass --query and --images, or --query_image and --texts")
    model = aligner.Aligner.load(_MODEL.value)
    options = {"device": _DEVICE.value, "trust_remote_code": _TRUST.value}
    image_encoder, text_encoder = (
        search.load_encoder(model, side, _ENCODERS[name].value, _WEIGHTS[name].value, **options)
        for side, name in (("x", "image"), ("y", "text"))
    )
    place = _INDEX.value or _MODEL.value / "search"
    searcher = search.Searcher(model, image_encoder, text_encoder, place)
    if query is not None and images is not None:
        answer = searcher.pictures(query, images, top=_TOP.value)
    else:
        answer = searcher.texts(picture, texts, top=_TOP.value)
    rows = [[rank, score, name] for rank, (name, score) in enumerate(answer.results, 1)]
    print(report.Table(["rank", "cosine", "picture" if by_text else "text"], rows, digits=3))
    report.write(_PAGE.value, answer.page)
    print(f"\nto look at: {_PAGE.value}")


if __name__ == "__main__":
    cli.run(_run)
