//! Every bit of every field of every structure and command, there and back.
//!
//! The tables say where a field is; the accessors are what moves it. For each bit of each field, set
//! alone in a structure of zeros and cleared alone in a structure of ones: exactly that bit of the
//! bytes changes, and the getter reads it back.

use crate::layout::{Field, Layout, Visitor};
use crate::typed::{CommandVisitor, Typed};

/// A structure or a command: something that becomes bytes.
#[derive(Debug)]
struct Subject<T: 'static> {
    name: &'static str,
    length: usize,
    fields: &'static [Field<T>],
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
    assert!(seen.structures > 30 && seen.bits > 1_000, "{} and {}", seen.structures, seen.bits);
}

#[test]
fn every_bit_of_every_field_of_every_command_survives() {
    let mut seen = RoundTrip::default();
    crate::visit_commands(&mut seen);
    assert!(seen.structures > 40 && seen.bits > 2_000, "{} and {}", seen.structures, seen.bits);
}

impl Visitor for RoundTrip {
    fn visit<T: Layout + PartialEq + core::fmt::Debug>(&mut self) {
        self.structures += 1;
        self.bits += check(&Subject {
            name: T::NAME,
            length: T::BYTES,
            fields: T::FIELDS,
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
fn check<T: Clone + 'static>(subject: &Subject<T>) -> usize {
    let length = subject.length;
    let mut owner = vec![None; length * 8];
    let mut bits = 0;
    for field in subject.fields {
        claim(subject, field, &mut owner);
        let mut inner = vec![None; length * 8];
        for part in field.parts {
            assert!(part.bit >= field.bit && part.bit + part.width <= field.bit + field.width);
            claim(subject, part, &mut inner);
        }
        for field in core::iter::once(field).chain(field.parts) {
            assert!(!field.meaning.is_empty() && !field.meaning.contains('\n'), "{}", field.name);
            for index in 0..field.count {
                for background in [0x00, 0xff] {
                    bits += flip_each(subject, field, index, &vec![background; length]);
                }
            }
        }
    }
    bits
}

fn claim<T>(subject: &Subject<T>, field: &Field<T>, owner: &mut [Option<&'static str>]) {
    let length = field.width * field.count;
    for owner in &mut owner[field.bit..field.bit + length] {
        let before = owner.replace(field.name);
        assert_eq!(before, None, "{}: {} lies over another field", subject.name, field.name);
    }
}

fn flip_each<T: Clone>(
    subject: &Subject<T>,
    field: &Field<T>,
    index: usize,
    background: &[u8],
) -> usize {
    let start = (subject.parse)(background);
    let before = (subject.bytes)(&start);
    let raw = (field.raw)(&start, index);
    for bit in 0..field.width {
        let mut changed = raw.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let mut structure = start.clone();
        (field.put)(&mut structure, index, &changed);
        let place = format!("{}.{}[{index}] bit {bit}", subject.name, field.name);
        assert_eq!((field.raw)(&structure, index), changed, "{place} is read back");
        let at = field.bit + index * field.width + bit;
        let mut expected = before.clone();
        expected[at / 8] ^= 1 << (at % 8);
        let after = (subject.bytes)(&structure);
        assert!(after == expected, "{place} changes bit {at} and nothing else");
        assert_eq!((field.raw)(&(subject.parse)(&after), index), changed, "{place} is parsed");
    }
    field.width
}
