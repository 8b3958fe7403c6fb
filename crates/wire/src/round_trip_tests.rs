//! Round-trip test of every bit of every field of all structures and commands.
//!
//! The field tables contain the positions; the accessors move the data. Each bit of each field is
//! set alone in a structure of zeros, and cleared alone in a structure of ones: exactly that bit of
//! the bytes must change, the getter must return it, and the table must show it.

use crate::layout::{Field, FieldAccessor, FieldDecoder, FieldValue, Layout, LayoutVisitor};
use crate::typed::{CommandVisitor, TypedCommand};

/// A structure or a command, without its type: what is tested is compiled once.
trait TestedStructure {
    /// Becomes the structure that lies in these bytes.
    fn load(&mut self, bytes: &[u8]);
    /// The structure's bytes.
    fn bytes(&self) -> Vec<u8>;
    /// Takes the raw bits of a field out.
    fn read_field_bits(&self, path: FieldPath, index: usize, raw: &mut [u8]);
    /// Puts raw bits into a field.
    fn write_field_bits(&mut self, path: FieldPath, index: usize, raw: &[u8]);
}

/// Which field, and which of its parts if it is one.
#[derive(Clone, Copy)]
struct FieldPath {
    field: usize,
    part: Option<usize>,
}

/// A structure in memory.
struct StructureUnderTest<T>(T);

/// A command.
struct CommandUnderTest<T>(T);

/// Counts what it has seen, so that an empty walk is noticed.
#[derive(Default)]
struct RoundTripVisitor {
    structures: usize,
    bits: usize,
}

#[test]
fn every_bit_of_every_structure_field_round_trips() {
    let mut seen = RoundTripVisitor::default();
    crate::visit_layouts(&mut seen);
    assert!(seen.structures > 150 && seen.bits > 800_000, "{} {}", seen.structures, seen.bits);
}

#[test]
fn every_bit_of_every_command_field_round_trips() {
    let mut seen = RoundTripVisitor::default();
    crate::visit_commands(&mut seen);
    assert!(seen.structures > 50 && seen.bits > 8_000, "{} {}", seen.structures, seen.bits);
}

impl LayoutVisitor for RoundTripVisitor {
    fn visit<T: Layout + PartialEq + core::fmt::Debug>(&mut self) {
        let mut subject = StructureUnderTest(T::parse(&vec![0; T::BYTES]).unwrap());
        self.structures += 1;
        self.bits += check_fields(T::NAME, T::BYTES, T::fields(), &mut subject);
        assert_truncation_rejected(T::NAME, T::BYTES, |bytes| T::parse(bytes).is_ok());
    }
}

impl CommandVisitor for RoundTripVisitor {
    fn visit<T: TypedCommand>(&mut self) {
        self.structures += 1;
        self.bits += check_fields(T::NAME, 64, T::fields(), &mut CommandUnderTest(T::default()));
        let other = crate::Command::new(!T::OPCODE);
        assert_eq!(T::parse(&other).err(), Some(crate::Status::INVALID_OPCODE), "{}", T::NAME);
    }
}

impl<T: Layout> TestedStructure for StructureUnderTest<T> {
    fn load(&mut self, bytes: &[u8]) {
        self.0 = T::parse(bytes).unwrap();
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.to_bytes()
    }

    fn read_field_bits(&self, path: FieldPath, index: usize, raw: &mut [u8]) {
        (accessor_of(T::ACCESSORS, path).raw)(&self.0, index, raw);
    }

    fn write_field_bits(&mut self, path: FieldPath, index: usize, raw: &[u8]) {
        (accessor_of(T::ACCESSORS, path).put)(&mut self.0, index, raw);
    }
}

impl<T: TypedCommand> TestedStructure for CommandUnderTest<T> {
    fn load(&mut self, bytes: &[u8]) {
        let command = crate::Command::from_bytes(bytes.try_into().unwrap());
        self.0 = T::parse(&T::with_opcode_of(command)).unwrap();
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.to_command().to_bytes().to_vec()
    }

    fn read_field_bits(&self, path: FieldPath, index: usize, raw: &mut [u8]) {
        (accessor_of(T::ACCESSORS, path).raw)(&self.0, index, raw);
    }

    fn write_field_bits(&mut self, path: FieldPath, index: usize, raw: &[u8]) {
        (accessor_of(T::ACCESSORS, path).put)(&mut self.0, index, raw);
    }
}

fn accessor_of<T>(accessors: &[FieldAccessor<T>], path: FieldPath) -> &FieldAccessor<T> {
    let whole = &accessors[path.field];
    path.part.map_or(whole, |part| &whole.parts[part])
}

fn assert_truncation_rejected(name: &str, length: usize, parses: fn(&[u8]) -> bool) {
    assert!(!parses(&vec![0; length - 1]), "{name} is read from too few bytes");
    assert!(parses(&vec![0xa5; length + 1]), "{name} is not read from more bytes");
}

/// How many bits were flipped.
fn check_fields(
    name: &str,
    length: usize,
    fields: &[Field],
    subject: &mut dyn TestedStructure,
) -> usize {
    let mut owner = vec![None; length * 8];
    let mut bits = 0;
    for (index, field) in fields.iter().enumerate() {
        claim_bits(name, field, &mut owner);
        bits += check_field_bit_flips(
            name,
            length,
            field,
            FieldPath { field: index, part: None },
            subject,
        );
        let mut inner = vec![None; length * 8];
        for (part_index, part) in field.parts.iter().enumerate() {
            assert!(part.bit >= field.bit && part.bit + part.width <= field.bit + field.width);
            claim_bits(name, part, &mut inner);
            let path = FieldPath { field: index, part: Some(part_index) };
            bits += check_field_bit_flips(name, length, part, path, subject);
        }
    }
    bits
}

fn claim_bits(name: &str, field: &Field, owner: &mut [Option<&'static str>]) {
    assert!(
        !field.description.is_empty() && !field.description.contains('\n'),
        "{name} {}",
        field.name
    );
    let length = field.width * field.count;
    for owner in &mut owner[field.bit..field.bit + length] {
        let before = owner.replace(field.name);
        assert_eq!(before, None, "{name}: {} lies over another field", field.name);
    }
}

fn check_field_bit_flips(
    name: &str,
    length: usize,
    field: &Field,
    path: FieldPath,
    subject: &mut dyn TestedStructure,
) -> usize {
    for index in 0..field.count {
        for background in [0x00, 0xff] {
            check_element_bit_flips(name, field, path, index, &vec![background; length], subject);
        }
    }
    2 * field.count * field.width
}

fn check_element_bit_flips(
    name: &str,
    field: &Field,
    path: FieldPath,
    index: usize,
    background: &[u8],
    subject: &mut dyn TestedStructure,
) {
    subject.load(background);
    let before = subject.bytes();
    let raw = raw_field(field, path, index, subject);
    for bit in 0..field.width {
        let place = || format!("{name}.{}[{index}] bit {bit}", field.name);
        let mut changed = raw.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        subject.load(&before);
        subject.write_field_bits(path, index, &changed);
        assert_eq!(raw_field(field, path, index, subject), changed, "{} is read back", place());
        let at = field.bit + index * field.width + bit;
        let mut expected = before.clone();
        expected[at / 8] ^= 1 << (at % 8);
        let after = subject.bytes();
        assert!(after == expected, "{} changes bit {at} and nothing else", place());
        subject.load(&after);
        assert_eq!(raw_field(field, path, index, subject), changed, "{} is parsed", place());
        assert_eq!(
            field.decode_element(&after, index),
            decode_raw(field, &changed),
            "{} is shown",
            place()
        );
    }
}

/// The raw bits of a field: its bytes, or the part of a word as a word.
fn raw_field(
    field: &Field,
    path: FieldPath,
    index: usize,
    subject: &dyn TestedStructure,
) -> Vec<u8> {
    let length = if matches!(field.show, FieldDecoder::Bytes(_)) { field.width / 8 } else { 8 };
    let mut raw = vec![0; length];
    subject.read_field_bits(path, index, &mut raw);
    raw
}

/// Meaning of the raw bits of a field.
fn decode_raw(field: &Field, raw: &[u8]) -> FieldValue {
    match field.show {
        FieldDecoder::Bytes(show) => show(raw),
        FieldDecoder::Bits(show) => show(u64::from_le_bytes(raw.try_into().unwrap())),
    }
}
