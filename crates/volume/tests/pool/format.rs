//! The code matches docs/developer/volume-format.md for every structure.

use tenmil_volume::Layout;
use tenmil_volume::format::{
    BlockKind, DeviceRecord, Header, LabelBody, OwnerRecord, ParentBody, Pointer, Record,
    SpanRecord, Superblock, VolumeBody,
};
use tenmil_volume::snapshot_stream::{StreamHead, StreamRecord};

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

fn assert_layout_documented<T: Layout>(text: &str) {
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
    assert_layout_documented::<Header>(&text);
    assert_layout_documented::<Pointer>(&text);
    assert_layout_documented::<Superblock>(&text);
    assert_layout_documented::<OwnerRecord>(&text);
    assert_layout_documented::<DeviceRecord>(&text);
    assert_layout_documented::<SpanRecord>(&text);
    assert_layout_documented::<LabelBody>(&text);
    assert_layout_documented::<Record>(&text);
    assert_layout_documented::<VolumeBody>(&text);
    assert_layout_documented::<ParentBody>(&text);
    assert_layout_documented::<StreamHead>(&text);
    assert_layout_documented::<StreamRecord>(&text);
}

#[test]
fn documented_block_kinds_match_the_codes() {
    let text = format_document();
    for kind in BlockKind::ALL {
        assert!(text.contains(&format!("\n| {} | {} |\n", kind.code(), kind.name())), "{kind:?}");
        assert_eq!(BlockKind::from_code(kind.code()), Some(kind));
    }
}
