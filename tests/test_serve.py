"""Tests of the search page over HTTP and in a browser."""

import base64
import concurrent.futures
import contextlib
import csv
import dataclasses
import html
import http.client
import io
import json
import os
import re
import shutil
import socket
import struct
import threading
import urllib.parse

import hostile_requests
import numpy as np
import PIL.Image
import pytest
import toy_encoders

from experiments import run as run_lib
from experiments import spec
from experiments.configs import files as files_config
from sotalign_jax import aligner, checks, serve
from sotalign_jax.search import datasets, extraction, pages, web
from sotalign_jax.search import model as model_lib

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes pictures of three colours, captions for half of them, embeddings and a model."""
    out = tmp_path_factory.mktemp("serve")
    rng, rows = np.random.default_rng(0), [("file", "caption")]
    (out / "pictures" / "sub").mkdir(parents=True)
    for number in range(24):
        for colour, rgb in COLOURS.items():
            name = f"{'sub/' if number % 2 else ''}{colour}{number}.png"
            pixels = np.clip(rgb + rng.normal(0, 12, (8, 8, 3)), 0, 255).astype(np.uint8)
            PIL.Image.fromarray(pixels).resize((80, 60)).save(out / "pictures" / name)
            if number < 12:
                rows.append((name, f"a <{colour}> square {number}"))
    with (out / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    for name in ("image", "text"):
        captions = out / "captions.csv" if name == "text" else None
        source = datasets.open_dataset("folder", out / "pictures", captions=captions)
        extraction.extract(source, toy_encoders.Toy(name), out / name, data={"name": "folder"})
    x, y = extraction.load(out / "image"), extraction.load(out / "text")
    extraction.write(out / "files", extraction.join("split", x, y), x, y)
    configs = spec.expand(files_config.get_config(f"from={out / 'files'}"))
    run_lib.run(configs["cca-seed0"], out / "run")
    return out


@pytest.fixture(scope="module")
def site(folder):
    encoders = {"x": toy_encoders.Toy("image"), "y": toy_encoders.Toy("text")}
    model = model_lib.Model(aligner.Aligner.load(folder / "run"), encoders, folder / "run")
    model = model.index(folder / "pictures", folder / "image")
    return serve.build(model, folder / "pictures", folder / "captions.csv", top=5)


@pytest.fixture(scope="module")
def server(site):
    with web.Server(site, "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def ask(server):
    """Returns a function that sends a request: (status, content, error line)."""
    with contextlib.closing(http.client.HTTPConnection(*server.server_address)) as connection:

        def send(address, method="GET", **options):
            connection.request(method, address, **options)
            answer = connection.getresponse()
            content = answer.read()
            error = re.search(rb'role="alert">(.*?)</p>', content)
            return answer.status, content, error and error[1].decode()

        yield send


def search(text, **options):
    return "/?" + urllib.parse.urlencode({"q": text, **options})


def shown(content):
    """Returns the names of the pictures on a page of results."""
    return re.findall(r"class='name' title='(.*?)'>", content.decode())


# --- answers over HTTP ----------------------------------------------------------------------------


def test_start_page_suggests_unseen_captions_and_pictures(folder, site, ask):
    status, content, error = ask("/")
    page = content.decode()
    assert status == 200 and error == "" and "Search 72 pictures" in page
    links = re.findall(r"<li><a class='button' href='/\?q=(.*?)'", page)
    suggested = {urllib.parse.unquote_plus(link) for link in links}
    test = json.loads((folder / "files" / "test_y.ids.json").read_text())["texts"]
    assert len(links) == len(suggested) == serve.EXAMPLES and suggested <= set(test)
    assert len(re.findall(r"<a href='/\?like=", page)) == pages.MOSAIC


def test_held_out_is_empty_without_training_files(site):
    assert serve.held_out(aligner.Aligner(site.model.aligner.heads, {})) == []


def test_run_stores_encoders_and_ids_with_the_aligner(folder, site, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "elsewhere")
    copied = aligner.Aligner.load(tmp_path / "elsewhere")
    names = {side: one["name"] for side, one in copied.info["encoders"].items()}
    assert names == {"x": "toy", "y": "toy"}
    x, y = extraction.load(folder / "image"), extraction.load(folder / "text")
    parts = {"pairs_x": (x, "x"), "pairs_y": (y, "y"), "test_x": (x, "test_x")}
    for part, (source, file) in parts.items():
        row_of = {origin.id: n for n, origin in enumerate(source.origins)}
        rows = source.rows[[row_of[name] for name in copied.rows[part]]]
        stored = np.load(folder / "files" / f"{file}.npy")
        # Pairs are drawn in a random order.
        assert sorted(row.tobytes() for row in rows) == sorted(row.tobytes() for row in stored)
    texts = {origin.id: origin.text for origin in y.origins}
    assert [texts[name] for name in copied.rows["test_y"]] == copied.rows["test_texts"]
    assert not set(copied.rows["pairs_x"]) & set(copied.rows["test_x"])


def test_page_shows_results_captions_and_badges(folder, site, ask):
    status, content, error = ask(search("a <red> square"))
    assert status == 200 and error == ""
    page = content.decode()
    hits = site.model.search("a <red> square", k=5)
    assert shown(content) == [hit.id for hit in hits]
    assert all("red" in hit.id for hit in hits)
    assert 'value="a &lt;red&gt; square"' in page and "<red>" not in page
    captions = dict(csv.reader((folder / "captions.csv").read_text().splitlines()))
    trained = {row.tobytes() for row in np.load(folder / "files" / "x.npy")}
    rows = extraction.load(folder / "image").rows
    for hit, card in zip(hits, page.split("<figure ")[1:], strict=True):
        caption = captions.get(hit.id, "").replace("<", "&lt;").replace(">", "&gt;")
        assert (f"<q>{caption}</q>" in card) == bool(caption)
        assert f"alt='{caption or hit.id}'" in card
        assert ("class='badge'" in card) == (rows[hit.row].tobytes() in trained)


def test_only_the_searching_thread_uses_the_tokenizer(site):
    """Tokenizers of transformers raise "Already borrowed" if two threads use them at once."""
    seen = []
    text = toy_encoders.Toy("text")
    text.unknown = lambda _: float(seen.append(threading.get_ident()) or 0.0)
    model = dataclasses.replace(site.model, encoders={**site.model.encoders, "y": text})
    watched = dataclasses.replace(site, model=model)
    for address in (search("red"), "/api/search?q=red"):
        assert watched.answer("GET", address).status == 200
    assert len(seen) >= 2
    assert set(seen) == {site.searcher.submit(threading.get_ident).result()}


def confident(site, slope, floor):
    """Returns the site with a known confidence of plain scores."""
    info = {**site.model.aligner.info, "confidence": {"y_to_x": {"plain": [slope, floor]}}}
    aligned = dataclasses.replace(site.model.aligner, info=info)
    return dataclasses.replace(site, model=dataclasses.replace(site.model, aligner=aligned))


def test_page_describes_results_in_words(site):
    sure = confident(site, 1000.0, -1000.0)
    address = search("a <red> square 3", calibrated="off")
    hits = sure.model.search("a <red> square 3", k=5, calibrated=False)
    page = sure.answer("GET", address).content.decode()
    assert hits[0].word != "weak" and pages.NOTHING not in page
    assert re.findall("<figure class='(.*?)'>", page) == [hit.word for hit in hits]
    assert re.findall(r"class='match'\s+title='.*?'>(\w+) match<", page) == [h.word for h in hits]
    # With a slope of zero, all results are equally improbable.
    page = confident(site, 0.0, 0.0).answer("GET", address).content.decode()
    assert pages.NOTHING in page
    assert re.findall("<figure class='(.*?)'>", page) == ["weak"] * 5


def test_page_and_api_say_that_a_script_is_unknown(site, ask):
    sure = confident(site, 1000.0, -1000.0)
    page = sure.answer("GET", search("\u8eca", calibrated="off")).content.decode()
    assert model_lib.UNKNOWN_SCRIPT in page and "match<" not in page
    assert page.count("a guess") == page.count("<figure class='weak'>") == 5
    address = "/api/search?" + urllib.parse.urlencode({"q": "\u8eca"})
    assert json.loads(ask(address)[1])["warning"] == model_lib.UNKNOWN_SCRIPT


def test_page_marks_captions_that_were_held_out_for_testing(site):
    tested = [hit.id for hit in site.model.search("a <red> square", k=5) if site.caption(hit.id)]
    page = dataclasses.replace(site, tested=frozenset(tested[:1]))
    content = page.answer("GET", search("a <red> square")).content
    assert content.count(b"caption held out for testing") == 1


def test_page_orders_by_calibrated_scores(site, ask):
    _, content, _ = ask(search("a blue square", calibrated="on"))
    hits = site.model.search("a blue square", k=5, calibrated=True)
    assert shown(content) == [hit.id for hit in hits]
    assert b'name="calibrated" checked' in content


def test_page_offers_more_results_until_all_are_shown(site, ask):
    address, counts = search("a blue square", calibrated="on"), []
    while address:
        content = ask(address)[1]
        counts.append(len(shown(content)))
        link = re.search(r"class='more button' href='(.*?)'", content.decode())
        address = link and html.unescape(link[1])
        if counts[-1] == 10:
            address = address.replace("k=15", "k=70")
    assert counts == [5, 10, 70, 72]
    every = site.model.search("a blue square", k=72, calibrated=True)
    assert shown(content) == [hit.id for hit in every]


def test_page_shows_as_many_results_as_top_says(site):
    many = dataclasses.replace(site, top=300)
    assert len(shown(many.answer("GET", search("red")).content)) == 72
    assert many.answer("GET", search("red", k=301)).status == 400


def test_page_finds_similar_pictures_by_upload_and_name(folder, ask):
    file = folder / "pictures" / "sub" / "green3.png"
    status, content, _ = ask("/?k=6", "POST", body=file.read_bytes())
    found = shown(content)
    assert status == 200 and found[0] == "sub/green3.png" and b"100% similar" in content
    # The picture itself is left out.
    assert shown(ask("/?like=sub/green3.png")[1]) == found[1:]


def test_api_returns_the_results_as_json(site, ask):
    _, content, _ = ask("/api/search?" + urllib.parse.urlencode({"q": "a red square", "k": 7}))
    answer = json.loads(content)
    hits = site.model.search("a red square", k=7)
    assert answer["pictures"] == 72
    assert [result["name"] for result in answer["results"]] == [hit.id for hit in hits]
    for result, hit in zip(answer["results"], hits, strict=True):
        assert result["score"] == pytest.approx(hit.score, abs=1e-6)
        assert result["confidence"] == pytest.approx(hit.confidence, abs=1e-4)
        assert result["word"] == (hit.word or None)
        assert result["caption"] == site.caption(hit.id)
        assert isinstance(result["captioned_in_training"], bool)
        assert ask(result["picture"])[0] == 200
    similar = json.loads(ask("/api/search?like=red0.png&k=3")[1])["results"]
    row = site.rows["red0.png"]
    assert [result["name"] for result in similar] == [h.id for h in site.model.similar(row, 3)]
    (described,) = json.loads(ask("/api/openapi.json")[1])["paths"].values()
    parameters = [parameter["name"] for parameter in described["get"]["parameters"]]
    assert parameters == ["q", "like", "k", "calibrated"]


@pytest.mark.parametrize(
    ("parameters", "status", "named"),
    [("", 400, "words"), ("q=a&k=0", 400, "k "), ("q=a&k=201", 400, "k "), ("q=a&k=x", 400, "k "),
     ("like=gone.png", 404, "gone.png"), ("like=%00", 404, "x00"), ("like=%ff", 404, "udcff")],
)  # fmt: skip
def test_api_reports_errors_in_one_line(ask, parameters, status, named):
    found, content, _ = ask(f"/api/search?{parameters}")
    assert found == status and named in json.loads(content)["error"]
    assert ask(f"/?{parameters}")[0] == (status if parameters else 200)


@pytest.mark.parametrize(
    ("address", "body", "status"),
    [
        (search(" "), None, 400),
        (search("red", k=0), None, 400),
        ("/?like=gone.png", None, 404),
        ("/etc/passwd", None, 404),
        ("/", b"", 400),
        ("/", b"no picture", 400),
        ("/", hostile_requests.png(13_300, 13_300, complete=False), 400),
        ("/", bytes(web.LARGEST + 1), 413),
    ],
    ids=["blank", "none", "gone", "path", "empty", "text", "huge", "long"],
)
def test_page_reports_bad_requests_in_one_line(ask, address, body, status):
    found, content, error = ask(address, "GET" if body is None else "POST", body=body)
    assert found == status and error and "\n" not in error and "0x" not in error
    assert b"<figure>" not in content
    assert "q=red" not in address or b'value="red"' in content
    assert b"class='mosaic'" in content  # what to search for instead


def test_page_serves_pictures_of_the_folder_only(folder, site, ask, tmp_path):
    status, content, _ = ask("/picture/red0.png")
    assert status == 200 and content.startswith(b"\xff\xd8")
    for address in ("/picture/0", "/picture/", "/picture/../../captions.csv", "/large/%00"):
        assert ask(address)[0] == 404
    pictures = shutil.copytree(folder / "pictures", tmp_path / "pictures")
    PIL.Image.new("RGB", (8, 8), "white").save(tmp_path / "outside.png")
    (pictures / "link.png").symlink_to(tmp_path / "outside.png")
    odd = "odd 'name' <&> #1?%20 é.png"
    PIL.Image.new("RGBA", (8, 8), (255, 0, 0, 90)).save(pictures / odd)
    model = model_lib.Model(site.model.aligner, site.model.encoders, tmp_path).index(pictures)
    linked = serve.build(model, pictures, None, top=75)
    assert linked.answer("GET", "/picture/link.png").status == 404
    assert linked.answer("GET", "/?like=link.png").status == 404
    assert linked.answer("GET", "/picture/red0.png").status == 200
    page = linked.answer("GET", search("red")).content
    assert html.escape(odd) in shown(page)
    (address,) = {link for link in re.findall(rb"src='(.*?)'", page) if b"odd" in link}
    assert linked.answer("GET", f"/?like={urllib.parse.quote(odd)}").status == 200
    # Transparent pixels stay transparent, so that a dark page has no white tiles.
    response = linked.answer("GET", address.decode())
    assert response.kind == "image/webp"
    assert PIL.Image.open(io.BytesIO(response.content)).getpixel((4, 4))[3] == 90


def test_page_follows_changed_and_removed_pictures(folder, site, tmp_path):
    pictures = shutil.copytree(folder / "pictures", tmp_path / "pictures")
    changing = dataclasses.replace(site, images=pictures)

    def colour():
        content, _, status = changing.answer("GET", "/picture/red0.png")
        return PIL.Image.open(io.BytesIO(content)).getpixel((9, 9)) if status == 200 else None

    assert colour()[0] > 150 > colour()[2]
    PIL.Image.new("RGB", (80, 60), "blue").save(pictures / "red0.png")
    assert colour()[2] > 150 > colour()[0]
    (pictures / "red0.png").unlink()
    assert colour() is None
    # A picture that has become a FIFO delays nothing, because its features are in the index.
    os.mkfifo(pictures / "red0.png")
    assert colour() is None
    assert changing.answer("GET", "/?like=red0.png").status == 200


def test_uploads_are_decoded_one_after_another_and_block_no_search(site):
    content = hostile_requests.png(9, 9)
    waiting, go_on = threading.Event(), threading.Event()
    site.decoder.submit(lambda: (waiting.set(), go_on.wait(60)))
    assert waiting.wait(60)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        upload = pool.submit(site.answer, "POST", "/", content)
        assert site.answer("GET", search("red")).status == 200
        assert not upload.done()
        go_on.set()
        assert upload.result().status == 200


def test_server_answers_mixed_and_hostile_requests(server, capfd):
    assert hostile_requests.wrong_answers(server.server_port, 200) == {}
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


def test_server_receives_few_large_uploads_at_a_time(server):
    large = hostile_requests.upload(bytes(web.SMALL + 1))
    with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as uploads:
        for _ in range(4):
            uploads.enter_context(server.uploads)
        waiting = pool.submit(hostile_requests.statuses, server.server_port, large)
        small = hostile_requests.upload(hostile_requests.png(9, 9))
        assert hostile_requests.statuses(server.server_port, small) == [200]
        assert not waiting.done()
        uploads.close()
        assert waiting.result() == [400]


def test_server_starts_no_program_for_an_upload(ask, tmp_path, monkeypatch):
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert ask("/", "POST", body=hostile_requests.eps())[0] == 400
    assert not (tmp_path / "started").exists()


def test_server_answers_head_without_content(ask):
    for address in ("/", search("red"), "/picture/red0.png"):
        status, content, _ = ask(address, "HEAD")
        assert status == 200 and content == b""


def test_server_answers_if_the_search_fails(folder, site, capfd):
    class Faulty(toy_encoders.Toy):
        def prepare(self, content):
            raise RuntimeError("out of order")

    encoders = {"x": site.model.encoders["x"], "y": Faulty("text")}
    model = dataclasses.replace(site.model, encoders=encoders)
    with web.Server(dataclasses.replace(site, model=model), "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        sent = hostile_requests.request(b"GET /?q=red")
        assert hostile_requests.statuses(running.server_port, sent) == [500]
        running.shutdown()
        thread.join()
    assert capfd.readouterr().err == "error: RuntimeError: out of order\n"


def test_server_survives_clients_that_disconnect(server, ask, capfd):
    linger = struct.pack("ii", 1, 0)  # closing the connection then resets it
    for sent in (
        b"",
        b"GET / HT",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
    ):
        with socket.create_connection(server.server_address) as connection:
            connection.sendall(sent)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert ask("/")[0] == 200
    assert capfd.readouterr().err == ""


def test_server_rejects_foreign_host_names(ask, server):
    for host, status in (("localhost:1", 200), ("127.0.0.1", 200), ("evil.example", 403)):
        assert ask("/", headers={"Host": host})[0] == status


def test_server_rejects_port_in_use(site, server):
    with pytest.raises(checks.InputError, match="port"):
        web.Server(site, "127.0.0.1", server.server_port)


# --- in a browser ---------------------------------------------------------------------------------

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run")  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as opened:
        opened.implicitly_wait(20)
        yield opened


def show(browser, width, scheme="light"):
    """Sets the width of the window in pixels and the colour scheme."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def names(browser, address=""):
    """Waits until the URL contains `address`. Returns the names of the pictures on the page."""
    ready = "return document.readyState === 'complete'"
    wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait(browser, 20)
    wait.until(lambda _: address in browser.current_url and browser.execute_script(ready))
    return re.findall(r'class="name" title="(.*?)">', browser.page_source)


@pytest.mark.optional
def test_page_in_browser_searches_by_text_and_picture(browser, server, site, folder, tmp_path):
    address = f"http://127.0.0.1:{server.server_port}/"
    show(browser, 1180)
    browser.get(address)
    browser.switch_to.active_element.send_keys("a red square")
    browser.find_element("class name", "primary").click()
    expected = site.model.search("a red square", k=5)
    assert names(browser, "q=") == [hit.id for hit in expected]
    loaded = "i => i.decode().then(() => i.alt && i.naturalWidth)"
    every = "return Promise.all([...document.querySelectorAll('.cards img')].map"
    widths = browser.execute_script(f"{every}({loaded}))")
    assert widths == [80] * 5
    before, other = browser.current_url, not site.model.aligner.calibrated
    browser.find_element("css selector", "[type=checkbox][name=calibrated]").click()
    wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait(browser, 20)
    wait.until(lambda _: browser.current_url != before)
    expected = site.model.search("a red square", k=10, calibrated=other)
    assert names(browser, "calibrated=") == [hit.id for hit in expected[:5]]
    # The hidden "off" comes first, and an unticked box sends nothing after it.
    assert ("calibrated=on" in browser.current_url) == other
    browser.find_element("class name", "more").click()
    browser.find_element("css selector", "figure:nth-child(10)")
    assert names(browser, "k=10") == [hit.id for hit in expected]

    browser.find_element("id", "picture").send_keys(str(folder / "pictures" / "blue4.png"))
    browser.find_element("css selector", ".asked img")
    assert names(browser)[0] == "blue4.png"
    browser.find_element("class name", "more").click()
    browser.find_element("css selector", "figure:nth-child(10)")
    browser.find_element("link text", "similar").click()
    browser.find_element("css selector", ".asked [alt='blue4.png']")
    assert "like=blue4.png" in browser.current_url and "blue4.png" not in names(browser)
    assert browser.get_log("browser") == []
    # The page loads all resources from the server itself.
    used = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    assert all(name.startswith(address) for name in browser.execute_script(used))

    bomb = hostile_requests.png(13_300, 13_300, complete=False)
    (tmp_path / "huge.png").write_bytes(bomb)
    browser.find_element("id", "picture").send_keys(str(tmp_path / "huge.png"))
    error = browser.find_element("css selector", "#error:not(:empty)")
    assert "pixels" in error.text and names(browser) == []
    # Answers that are no page, such as those of malformed requests, are shown in one line, too.
    browser.execute_script("return load('/picture/gone.png')")
    assert error.text == "no such picture"
    assert all("status of 40" in line["message"] for line in browser.get_log("browser"))


@pytest.mark.optional
def test_page_in_browser_accepts_dropped_and_pasted_pictures(browser, server, folder):
    give = """
        const bytes = Uint8Array.from(atob(arguments[1]), (c) => c.charCodeAt(0));
        const data = new DataTransfer();
        data.items.add(new File([bytes], "a.png", { type: "image/png" }));
        const given = { dataTransfer: data, clipboardData: data, bubbles: true };
        const kind = arguments[0] === "drop" ? DragEvent : ClipboardEvent;
        document.body.dispatchEvent(new kind(arguments[0], given));
    """
    for kind, name in (("drop", "green4.png"), ("paste", "red6.png")):
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        content = base64.b64encode((folder / "pictures" / name).read_bytes()).decode()
        browser.execute_script(give, kind, content)
        browser.find_element("css selector", ".asked img")
        assert names(browser)[0] == name


@pytest.mark.optional
def test_page_in_browser_enlarges_pictures(browser, server, site):
    browser.get(f"http://127.0.0.1:{server.server_port}{search('a green square')}")
    hits = site.model.search("a green square", k=5)

    def enlarged():
        picture = browser.find_element("css selector", "#large[open] img")
        return urllib.parse.urlsplit(picture.get_attribute("src")).path

    browser.find_elements("class name", "open")[1].click()
    assert enlarged() == f"/large/{hits[1].id}"
    browser.find_element("id", "following").click()
    assert enlarged() == f"/large/{hits[2].id}"
    for _ in range(3):
        browser.switch_to.active_element.send_keys("\ue012")  # the left arrow
    assert enlarged() == f"/large/{hits[4].id}"
    browser.find_element("id", "close").click()
    assert browser.execute_script("return document.querySelector('#large').open") is False
    assert browser.get_log("browser") == []


@pytest.mark.optional
def test_page_in_browser_fits_a_phone_in_dark_mode(browser, server):
    show(browser, 390, "dark")
    for address in ("/", search("a green square")):
        browser.get(f"http://127.0.0.1:{server.server_port}{address}")
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        for target in browser.find_elements("css selector", ".button, .like, label:not([hidden])"):
            if target.is_displayed():
                assert min(target.rect["height"], target.rect["width"]) >= 44, target.text
    boxes = [one.rect for one in browser.find_elements("tag name", "figure")]
    assert len({box["x"] for box in boxes}) == 2  # two columns
    colours = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    ink, paper = (sum(map(int, re.findall(r"\d+", c))) for c in browser.execute_script(colours))
    assert ink > 600 > 200 > paper
    tile = "return getComputedStyle(document.querySelector('.open')).backgroundColor"
    assert sum(map(int, re.findall(r"\d+", browser.execute_script(tile)))) < 400
