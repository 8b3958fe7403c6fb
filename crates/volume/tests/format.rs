//! The code matches docs/developer/volume-format.md for every structure.

#![expect(clippy::unwrap_used, reason = "a test may")]

use tenmil_volume::Layout;
use tenmil_volume::format::{
    BlockKind, DeviceRecord, Header, LabelBody, OwnerRecord, ParentBody, Pointer, Record,
    SpanRecord, Superblock, VolumeBody,
};
use tenmil_volume::stream::{StreamHead, StreamRecord};

fn format_document() -> String {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/developer/volume-format.md");
    std::fs::read_to_string(file).unwrap()
}

/// Offset, length and name of every field in the table of a structure.
fn documented_fields(text: &str, heading: &str) -> Vec<(usize, usize, String)> {
    let section = text.split(heading).nth(1).unwrap_or_else(|| panic!("no section `{heading}`"));
    let rows = section.lines().skip(4).take_while(|line| line.starts_with('|'));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let number = |cell: &str| cell.parse().unwrap();
        (number(cells[1]), number(cells[2]), cells[3].trim_matches('`').to_owned())
    };
    rows.map(row).collect()
}

fn compare_layout<T: Layout>(text: &str) {
    let found = documented_fields(text, &format!("### {}: {} bytes", T::NAME, T::BYTES));
    let mut at = 0;
    let mut expected = Vec::new();
    for (name, bytes) in T::FIELDS {
        expected.push((at, *bytes, (*name).to_owned()));
        at += bytes;
    }
    assert_eq!(found, expected, "{}", T::NAME);
}

#[test]
fn documented_structures_match_the_layouts() {
    let text = format_document();
    compare_layout::<Header>(&text);
    compare_layout::<Pointer>(&text);
    compare_layout::<Superblock>(&text);
    compare_layout::<OwnerRecord>(&text);
    compare_layout::<DeviceRecord>(&text);
    compare_layout::<SpanRecord>(&text);
    compare_layout::<LabelBody>(&text);
    compare_layout::<Record>(&text);
    compare_layout::<VolumeBody>(&text);
    compare_layout::<ParentBody>(&text);
    compare_layout::<StreamHead>(&text);
    compare_layout::<StreamRecord>(&text);
}

#[test]
fn documented_block_kinds_match_the_codes() {
    let text = format_document();
    for kind in BlockKind::ALL {
        assert!(text.contains(&format!("\n| {} | {} |\n", kind.code(), kind.name())), "{kind:?}");
        assert_eq!(BlockKind::from_code(kind.code()), Some(kind));
    }
}
