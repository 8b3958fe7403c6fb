//! Messages are words: no Debug text of a type stands in one.

use std::path::{Path, PathBuf};

/// Crates whose messages only developers read: simulators, fuzzers and tools.
const NOT_FOR_USERS: [&str; 4] = ["sim", "cluster", "fuzz", "xtask"];

/// Debug text that may stand there: what it prints of, and why.
const ALLOWED: [(&str, &str); 12] = [
    ("bench/src/reproduce/report_directory.rs", "a key that is compared and not read"),
    ("cli/src/commands/help_examples/shell_examples.rs", "a test"),
    ("cli/src/process_log.rs", "the writer of tracing fields, whose values are text"),
    ("dma/src/host_rings.rs", "a panic about a bug of our own"),
    ("linux/src/socket/", "memory that is in no region is a bug of our own"),
    ("linux/src/socket_stream.rs", "the same"),
    ("nvme-host/src/fake_device.rs", "a device of tests"),
    ("serve/src/tcp/buffer_pool/buffer.rs", "it is Debug itself"),
    ("wire/src/command.rs", "it is Debug itself"),
    ("wire/src/field_type.rs", "it is Debug itself"),
    ("wire/src/layout.rs", "text in quotes"),
    ("wire/src/nqn.rs", "a character in quotes"),
];

/// Debug text of these is a bug of our own: memory that is in no region.
const OWN_BUG: &str = "{stray:?}";

fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let is_tests = name.starts_with("tests") || name.ends_with("_tests.rs");
        if path.is_dir() && !["tests", "conformance", "simulation", "fuzz"].contains(&name) {
            files(&path, found);
        } else if name.ends_with(".rs")
            && !is_tests
            && !name.ends_with("_conformance.rs")
            && !["simulation.rs", "fuzz.rs"].contains(&name)
        {
            found.push(path);
        }
    }
}

/// Lines of a file's product code that print Debug text in a message.
fn lines_with_debug_output(text: &str) -> Vec<&str> {
    let product = text.split("\n#[cfg(test)]\nmod ").next().unwrap();
    let is_debug = |line: &&str| {
        let places = ["{:?}", ":?}", ":#?}", ":x?}"];
        let is_own = ["panic!(", "assert", "unreachable!("].iter().any(|word| line.contains(word));
        places.iter().any(|place| line.contains(place))
            && !is_own
            && !line.trim_start().starts_with("//")
            && !line.contains(OWN_BUG)
    };
    product.lines().filter(is_debug).collect()
}

/// Lines of a file's product code that print the number of a status in a message.
fn lines_with_bare_status(text: &str) -> Vec<&str> {
    let product = text.split("\n#[cfg(test)]\nmod ").next().unwrap();
    let is_number = |line: &&str| {
        let after = line.to_lowercase();
        let after = ["status {", "outcome {"].into_iter().filter_map(|word| after.split_once(word));
        let mut is_hex = after.map(|(_, rest)| rest.split('}').next().unwrap().ends_with('x'));
        is_hex.any(|is_hex| is_hex)
    };
    product.lines().filter(is_number).collect()
}

/// The name and the product code of every file with messages for users.
fn product_files() -> Vec<(String, String)> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut found = Vec::new();
    for entry in std::fs::read_dir(crates).unwrap() {
        let path = entry.unwrap().path();
        if !NOT_FOR_USERS.iter().any(|name| path.ends_with(name)) {
            files(&path.join("src"), &mut found);
        }
    }
    assert!(found.len() > 500, "the tree is there");
    let named = |path: &PathBuf| {
        let name = path.strip_prefix(crates).unwrap().to_str().unwrap().to_owned();
        (name, std::fs::read_to_string(path).unwrap())
    };
    found.iter().map(named).collect()
}

#[test]
fn messages_contain_no_debug_output() {
    let mut wrong = Vec::new();
    for (name, text) in &product_files() {
        if ALLOWED.iter().any(|(allowed, _)| name.starts_with(allowed)) {
            continue;
        }
        wrong.extend(
            lines_with_debug_output(text).iter().map(|line| format!("{name}: {}", line.trim())),
        );
    }
    assert!(wrong.is_empty(), "Debug text in messages, expected words:\n{}", wrong.join("\n"));
}

#[test]
fn messages_contain_no_status_without_its_name() {
    let mut wrong = Vec::new();
    for (name, text) in &product_files() {
        // Where the name of a status is written, the number stands beside it.
        if name != "base/src/request.rs" {
            wrong.extend(
                lines_with_bare_status(text).iter().map(|line| format!("{name}: {}", line.trim())),
            );
        }
    }
    assert!(wrong.is_empty(), "numbers in messages, expected words:\n{}", wrong.join("\n"));
}
