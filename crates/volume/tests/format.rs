//! The code matches docs/developer/volume-format.md for every structure.

#![expect(clippy::unwrap_used, reason = "a test may")]

use tenmil_volume::Layout;
use tenmil_volume::format::{
    DeviceRecord, Header, Kind, LabelBody, OwnerRecord, ParentBody, Pointer, Record, SpanRecord,
    Superblock, VolumeBody,
};
use tenmil_volume::stream::{StreamHead, StreamRecord};

fn text() -> String {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/developer/volume-format.md");
    std::fs::read_to_string(file).unwrap()
}

/// Offset, length and name of every field in the table of a structure.
fn table(text: &str, heading: &str) -> Vec<(usize, usize, String)> {
    let section = text.split(heading).nth(1).unwrap_or_else(|| panic!("no section `{heading}`"));
    let rows = section.lines().skip(4).take_while(|line| line.starts_with('|'));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let number = |cell: &str| cell.parse().unwrap();
        (number(cells[1]), number(cells[2]), cells[3].trim_matches('`').to_owned())
    };
    rows.map(row).collect()
}

fn compare<T: Layout>(text: &str) {
    let found = table(text, &format!("### {}: {} bytes", T::NAME, T::BYTES));
    let mut at = 0;
    let mut expected = Vec::new();
    for (name, bytes) in T::FIELDS {
        expected.push((at, *bytes, (*name).to_owned()));
        at += bytes;
    }
    assert_eq!(found, expected, "{}", T::NAME);
}

#[test]
fn every_structure_is_drawn_as_it_is() {
    let text = text();
    compare::<Header>(&text);
    compare::<Pointer>(&text);
    compare::<Superblock>(&text);
    compare::<OwnerRecord>(&text);
    compare::<DeviceRecord>(&text);
    compare::<SpanRecord>(&text);
    compare::<LabelBody>(&text);
    compare::<Record>(&text);
    compare::<VolumeBody>(&text);
    compare::<ParentBody>(&text);
    compare::<StreamHead>(&text);
    compare::<StreamRecord>(&text);
}

#[test]
fn every_kind_has_the_code_that_is_written_down() {
    let text = text();
    for kind in Kind::ALL {
        assert!(text.contains(&format!("\n| {} | {} |\n", kind.code(), kind.name())), "{kind:?}");
        assert_eq!(Kind::from_code(kind.code()), Some(kind));
    }
}
