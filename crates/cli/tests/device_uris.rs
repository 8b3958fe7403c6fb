//! docs/user/device-uris.md says what there is: every kind of device, and all that each may be told.

use std::collections::{BTreeMap, BTreeSet};

use tenmil_block::Opener;
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

const PAGE: &str = include_str!("../../../docs/user/device-uris.md");

/// A name of each kind, which nothing but an unknown key is wrong with. Where a kind has several
/// forms that take different keys, one of each.
const NAMES: [&str; 16] = [
    "null:?",
    "ram:1m?",
    "file:/nowhere?",
    "model:p4600?",
    "model:[null:]?device=p4600&",
    "delay:[null:]?",
    "fault:[null:]?",
    "split:[null:]?",
    "stripe:[null:],[null:]?",
    "mirror:[null:],[null:]?",
    "volume:[null:]/x?",
    "emu:null?",
    "tcp://127.0.0.1:1/nqn.2024-01.example:disk?",
    "vfio-user:/nowhere?",
    "pcie:0000:00:00.0?",
    "rbd:pool/image?",
];

type UriKeys = BTreeMap<String, BTreeSet<String>>;

/// What the program says that it knows.
fn implemented_keys() -> UriKeys {
    let regions = RegionTable::new(16);
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, kinds: tenmil::KINDS };
    let mut kinds = UriKeys::new();
    for name in NAMES {
        let refused = opener.open(&format!("{name}unheard-of=1").parse().expect("a name")).err();
        let refused = refused.expect("no kind knows such a key").to_string();
        let (_, keys) = refused.split_once("no parameter `unheard-of`, expected ").expect(&refused);
        let keys = keys.split(", ").flat_map(|some| some.split(" or ")).map(str::to_owned);
        let kind = name.split_inclusive(':').next().expect("a kind");
        kinds.entry(kind.to_owned()).or_default().extend(keys);
    }
    kinds
}

/// The keys in the first column of a row: "| `hdgst`, `ddgst` | ...".
fn keys_of(row: &str) -> impl Iterator<Item = String> {
    let column = row.split('|').nth(1).unwrap_or_default();
    column.split('`').skip(1).step_by(2).map(str::to_owned)
}

/// What the page says: the keys in the tables whose head is `key`, below each kind.
fn documented_keys() -> UriKeys {
    let mut kinds = UriKeys::new();
    let (mut kind, mut is_table) = (String::new(), false);
    for line in PAGE.lines() {
        if let Some(name) = line.strip_prefix("## `") {
            kind = name.trim_end_matches('`').to_owned();
            kinds.insert(kind.clone(), BTreeSet::new());
        }
        is_table = line.starts_with("| key") || (is_table && line.starts_with('|'));
        if is_table && !line.starts_with("| key") {
            kinds.get_mut(&kind).expect("a table is below a kind").extend(keys_of(line));
        }
    }
    kinds
}

#[test]
fn documentation_lists_every_device_kind_with_exactly_its_keys() {
    let mut written = documented_keys();
    let crypt = written.remove("crypt:").expect("a kind that is not in every build");
    assert_eq!(crypt, BTreeSet::from(["key-file".to_owned()]));
    assert_eq!(written, implemented_keys());
}

#[test]
fn every_documented_device_uri_parses() {
    let in_quotes = PAGE
        .lines()
        .filter(|line| line.starts_with("tenmil "))
        .filter_map(|line| line.split('\'').nth(1));
    let names: Vec<&str> = in_quotes.collect();
    assert!(names.len() >= 6, "{names:?}");
    // Short forms are paths that exist.
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::File::create_new(directory.path().join("pool")).expect("a file");
    std::env::set_current_dir(directory.path()).expect("a directory");
    for name in names {
        let parsed = name.parse::<tenmil_devices::Uri>();
        assert!(parsed.is_ok(), "{name}: {parsed:?}");
    }
}
