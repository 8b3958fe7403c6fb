//! Every bit of every field of every structure and command, there and back.
//!
//! The tables say where a field is; the accessors are what moves it. For each bit of each field, set
//! alone in a structure of zeros and cleared alone in a structure of ones: exactly that bit of the
//! bytes changes, and the getter reads it back.

use crate::layout::{Accessor, Field, Layout, Show, Value, Visitor};
use crate::typed::{CommandVisitor, Typed};

/// A structure or a command: something that becomes bytes.
struct Subject<T: 'static> {
    name: &'static str,
    length: usize,
    fields: &'static [Field],
    accessors: &'static [Accessor<T>],
    bytes: fn(&T) -> Vec<u8>,
    parse: fn(&[u8]) -> T,
}

/// Counts what it has seen, so that an empty walk is noticed.
#[derive(Default)]
struct RoundTrip {
    structures: usize,
    bits: usize,
}

#[test]
fn every_bit_of_every_field_of_every_structure_survives() {
    let mut seen = RoundTrip::default();
    crate::visit_layouts(&mut seen);
    assert!(seen.structures > 130 && seen.bits > 800_000, "{} {}", seen.structures, seen.bits);
}

#[test]
fn every_bit_of_every_field_of_every_command_survives() {
    let mut seen = RoundTrip::default();
    crate::visit_commands(&mut seen);
    assert!(seen.structures > 40 && seen.bits > 7_000, "{} {}", seen.structures, seen.bits);
}

impl Visitor for RoundTrip {
    fn visit<T: Layout + PartialEq + core::fmt::Debug>(&mut self) {
        self.structures += 1;
        self.bits += check(&Subject {
            name: T::NAME,
            length: T::BYTES,
            fields: T::FIELDS,
            accessors: T::ACCESSORS,
            bytes: T::bytes,
            parse: |bytes| T::parse(bytes).unwrap(),
        });
        let length = T::BYTES;
        assert_eq!(T::parse(&vec![0; length - 1]).unwrap_err().need_bytes, length, "{}", T::NAME);
        assert_eq!(T::parse(&vec![0xa5; length + 1]).unwrap().bytes(), vec![0xa5; length]);
    }
}

impl CommandVisitor for RoundTrip {
    fn visit<T: Typed>(&mut self) {
        self.structures += 1;
        self.bits += check(&Subject {
            name: T::NAME,
            length: 64,
            fields: T::FIELDS,
            accessors: T::ACCESSORS,
            bytes: |it: &T| it.to_command().to_bytes().to_vec(),
            parse: |bytes| {
                let mut bytes: [u8; 64] = bytes.try_into().unwrap();
                bytes[0] = T::OPCODE;
                T::parse(&crate::Command::from_bytes(&bytes)).unwrap()
            },
        });
        let other = crate::Command::new(!T::OPCODE);
        assert_eq!(T::parse(&other), Err(crate::Status::INVALID_OPCODE), "{}", T::NAME);
    }
}

/// How many bits were flipped.
fn check<T: Clone>(subject: &Subject<T>) -> usize {
    let mut owner = vec![None; subject.length * 8];
    let mut bits = 0;
    assert_eq!(subject.fields.len(), subject.accessors.len());
    for (field, accessor) in subject.fields.iter().zip(subject.accessors) {
        claim(subject.name, field, &mut owner);
        bits += flip(subject, field, accessor);
        let mut inner = vec![None; subject.length * 8];
        for (part, accessor) in field.parts.iter().zip(accessor.parts) {
            assert!(part.bit >= field.bit && part.bit + part.width <= field.bit + field.width);
            claim(subject.name, part, &mut inner);
            bits += flip(subject, part, accessor);
        }
    }
    bits
}

fn claim(name: &str, field: &Field, owner: &mut [Option<&'static str>]) {
    assert!(!field.meaning.is_empty() && !field.meaning.contains('\n'), "{name} {}", field.name);
    let length = field.width * field.count;
    for owner in &mut owner[field.bit..field.bit + length] {
        let before = owner.replace(field.name);
        assert_eq!(before, None, "{name}: {} lies over another field", field.name);
    }
}

fn flip<T: Clone>(subject: &Subject<T>, field: &Field, accessor: &Accessor<T>) -> usize {
    for index in 0..field.count {
        for background in [0x00, 0xff] {
            flip_element(subject, field, accessor, index, &vec![background; subject.length]);
        }
    }
    2 * field.count * field.width
}

fn flip_element<T: Clone>(
    subject: &Subject<T>,
    field: &Field,
    accessor: &Accessor<T>,
    index: usize,
    background: &[u8],
) {
    let start = (subject.parse)(background);
    let before = (subject.bytes)(&start);
    let raw = raw_of(field, accessor, &start, index);
    for bit in 0..field.width {
        let mut changed = raw.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let mut structure = start.clone();
        (accessor.put)(&mut structure, index, &changed);
        let place = || format!("{}.{}[{index}] bit {bit}", subject.name, field.name);
        assert_eq!(raw_of(field, accessor, &structure, index), changed, "{} is read back", place());
        let at = field.bit + index * field.width + bit;
        let mut expected = before.clone();
        expected[at / 8] ^= 1 << (at % 8);
        let after = (subject.bytes)(&structure);
        assert!(after == expected, "{} changes bit {at} and nothing else", place());
        let parsed = raw_of(field, accessor, &(subject.parse)(&after), index);
        assert_eq!(parsed, changed, "{} is parsed", place());
        assert_eq!(field.element(&after, index), shown(field, &changed), "{} is shown", place());
    }
}

/// The raw bits of a field: its bytes, or the part of a word as a word.
fn raw_of<T>(field: &Field, accessor: &Accessor<T>, structure: &T, index: usize) -> Vec<u8> {
    let length = if matches!(field.show, Show::Bytes(_)) { field.width / 8 } else { 8 };
    let mut raw = vec![0; length];
    (accessor.raw)(structure, index, &mut raw);
    raw
}

/// What the raw bits of a field say.
fn shown(field: &Field, raw: &[u8]) -> Value {
    match field.show {
        Show::Bytes(show) => show(raw),
        Show::Bits(show) => show(u64::from_le_bytes(raw.try_into().unwrap())),
    }
}
