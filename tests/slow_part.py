"""`pytest -m slow --slow-part=2/6` runs the third of six parts of the slow tests. CI runs one a commit."""

# of a slow test that does not say `slow(minutes=...)`, as those of the real network, which CI does not have
MINUTES = 0.2


def pytest_addoption(parser):
    parser.addoption("--slow-part", metavar="K/N", help="only part K, from 0, of N parts of the slow tests")


def minutes(item) -> float:
    return item.get_closest_marker("slow").kwargs.get("minutes", MINUTES)


def pytest_collection_modifyitems(config, items):
    if asked := config.getoption("--slow-part"):
        part, count = map(int, asked.split("/"))
        slow = [item for item in items if item.get_closest_marker("slow")]
        parts = [[] for _ in range(count)]
        for item in sorted(slow, key=lambda item: (-minutes(item), item.nodeid)):
            min(parts, key=lambda part: sum(map(minutes, part))).append(item)
        order = parts[part]
        items[:] = order[::2] + order[1::2]  # of two workers each begins with a half, with its longest test
