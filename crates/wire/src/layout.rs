//! Structure layouts: one declaration per structure defines accessors, a field table and tests.
//!
//! ```text
//! layout! {
//!     /// A made-up page.
//!     pub struct Page[8] {
//!         /// A number of two bytes.
//!         size @ 0: u16;
//!         /// A word of flags.
//!         flags @ 2: u8 {
//!             /// One bit.
//!             ready @ 0: bool;
//!             /// Three bits.
//!             level @ 1..=3: u8;
//!         };
//!         /// Four elements side by side.
//!         samples @ 4: u8[4];
//!     }
//! }
//! let page = Page::zeroed().with(|page| page.size(7).ready(true).samples(2, 9));
//! assert_eq!(page.as_bytes(), &[7, 0, 1, 0, 0, 0, 9, 0]);
//! assert_eq!((page.size(), page.ready(), page.samples(2)), (7, true, Some(9)));
//! ```
//!
//! `struct Name[N]` is N bytes of little-endian memory, with offsets in bytes. `struct Name(u32)`
//! is one register or dword, with offsets in bits. Both implement [`Layout`], so one function
//! prints every structure and one test visits every bit of every field.
//!
//! Setters are methods of [`FieldSetters`], which `set()` returns and `with()` passes to its closure.

use core::fmt;

mod layout_macro;

pub(crate) use layout_macro::layout;

pub use crate::field_type::{Ascii, BitFieldType, FieldKind, FieldType};

/// Structure whose fields are declared with `layout!`.
pub trait Layout: Clone + Sized + 'static {
    /// Name of the structure.
    const NAME: &'static str;
    /// Length on the wire.
    const BYTES: usize;
    /// Fields, in the order of declaration.
    fn fields() -> &'static [Field];
    /// Accessors of the fields, in the same order.
    #[cfg(test)]
    const ACCESSORS: &'static [FieldAccessor<Self>];

    /// Parses the structure from the first [`Self::BYTES`] bytes.
    fn parse(bytes: &[u8]) -> Result<Self, TruncatedError>;

    /// Bytes of the structure on the wire.
    fn to_bytes(&self) -> Vec<u8>;

    /// All fields with their values, for printing.
    fn decode_fields(&self) -> Vec<DecodedField> {
        decode(&self.to_bytes(), Self::fields())
    }
}

/// Visitor called for every declared structure.
pub trait LayoutVisitor {
    /// Visits one structure.
    fn visit<T: Layout + PartialEq + fmt::Debug>(&mut self);
}

/// Field of a structure.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Name of the field and its accessor.
    pub name: &'static str,
    /// Meaning, in one line.
    pub description: &'static str,
    /// Offset in bits from the start of the structure.
    pub bit: usize,
    /// Width of the field, or of each element.
    pub width: usize,
    /// Number of elements: 1 unless the field is an array.
    pub count: usize,
    /// Whether the field is an array, even one of a single element.
    pub repeated: bool,
    /// Interpretation of its bits.
    pub kind: FieldKind,
    /// Decodes its bits for printing.
    pub show: FieldDecoder,
    /// Named parts of a word.
    pub parts: &'static [Field],
}

/// Decoder of a field's bits.
#[derive(Clone, Copy, Debug)]
pub enum FieldDecoder {
    /// For whole bytes.
    Bytes(fn(&[u8]) -> FieldValue),
    /// For some bits of a word, 64 at most.
    Bits(fn(u64) -> FieldValue),
}

/// Getter and setter of a field, as called by tests.
#[cfg(test)]
#[derive(Debug)]
pub struct FieldAccessor<T: 'static> {
    /// Reads the raw bits of element `index` through the public getter.
    pub raw: fn(&T, usize, &mut [u8]),
    /// Writes raw bits to element `index` through the public setter.
    pub put: fn(&mut T, usize, &[u8]),
    /// Accessors of the named parts of a word.
    pub parts: &'static [FieldAccessor<T>],
}

/// Chained setters of a structure.
#[derive(Debug)]
pub struct FieldSetters<'a, T>(
    /// The structure being written.
    pub &'a mut T,
);

/// Decoded value of a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldValue {
    /// One bit.
    Flag(bool),
    /// An unsigned number.
    Number(u128),
    /// A code with its name in the specification.
    Code(u64, &'static str),
    /// Text, without its padding.
    Text(String),
    /// Uninterpreted bytes.
    Bytes(Vec<u8>),
    /// Another structure.
    Structure(Vec<DecodedField>),
    /// An array.
    List(Vec<FieldValue>),
}

/// Decoded field of a structure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodedField {
    /// Name of the field.
    pub name: &'static str,
    /// Meaning of the field.
    pub description: &'static str,
    /// Value of the field.
    pub value: FieldValue,
    /// Parts of a word, if it has any.
    pub parts: Vec<DecodedField>,
}

/// Buffer shorter than the structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TruncatedError {
    /// Name of the structure.
    pub what: &'static str,
    /// Bytes available.
    pub got_bytes: usize,
    /// Bytes required.
    pub need_bytes: usize,
}

impl TruncatedError {
    /// `Ok` if `got_bytes` suffice for `need_bytes` of `what`.
    pub const fn check_length(
        what: &'static str,
        got_bytes: usize,
        need_bytes: usize,
    ) -> Result<(), Self> {
        if got_bytes < need_bytes { Err(Self { what, got_bytes, need_bytes }) } else { Ok(()) }
    }
}

impl fmt::Display for TruncatedError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, got_bytes, need_bytes } = self;
        write!(out, "parse {what}: {got_bytes} bytes, expected at least {need_bytes}")
    }
}

impl core::error::Error for TruncatedError {}

impl FieldValue {
    /// Whether every bit is zero, so that a printer may omit it.
    pub fn is_zero(&self) -> bool {
        match self {
            Self::Flag(flag) => !flag,
            Self::Number(number) => *number == 0,
            Self::Code(code, _) => *code == 0,
            Self::Text(text) => text.is_empty(),
            Self::Bytes(bytes) => bytes.iter().all(|&byte| byte == 0),
            Self::Structure(fields) => fields.iter().all(|field| field.value.is_zero()),
            Self::List(values) => values.iter().all(Self::is_zero),
        }
    }
}

impl fmt::Display for FieldValue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => write!(out, "{}", u8::from(*flag)),
            Self::Number(number) => write!(out, "{number:#x}"),
            Self::Code(code, name) => write!(out, "{code:#x} ({name})"),
            Self::Text(text) => write!(out, "{text:?}"),
            Self::Bytes(bytes) => bytes.iter().try_for_each(|byte| write!(out, "{byte:02x}")),
            Self::Structure(fields) => {
                let shown = fields.iter().filter(|field| !field.value.is_zero());
                write_list(out, "{", shown.map(|field| (Some(field.name), &field.value)), "}")
            }
            Self::List(values) => {
                write_list(out, "[", values.iter().map(|value| (None, value)), "]")
            }
        }
    }
}

fn write_list<'a>(
    out: &mut fmt::Formatter<'_>,
    open: &str,
    items: impl Iterator<Item = (Option<&'a str>, &'a FieldValue)>,
    close: &str,
) -> fmt::Result {
    out.write_str(open)?;
    for (index, (name, value)) in items.enumerate() {
        out.write_str(if index == 0 { "" } else { ", " })?;
        if let Some(name) = name {
            write!(out, "{name}: ")?;
        }
        write!(out, "{value}")?;
    }
    out.write_str(close)
}

/// Decodes every field of `fields` in `bytes`.
#[must_use]
pub fn decode(bytes: &[u8], fields: &[Field]) -> Vec<DecodedField> {
    let whole = |field: &Field| DecodedField {
        name: field.name,
        description: field.description,
        value: field.value(bytes),
        parts: decode(bytes, field.parts),
    };
    fields.iter().map(whole).collect()
}

impl Field {
    fn value(&self, bytes: &[u8]) -> FieldValue {
        if self.repeated {
            FieldValue::List(
                (0..self.count).map(|index| self.decode_element(bytes, index)).collect(),
            )
        } else {
            self.decode_element(bytes, 0)
        }
    }

    pub(crate) fn decode_element(&self, bytes: &[u8], index: usize) -> FieldValue {
        let at = self.bit + index * self.width;
        match self.show {
            FieldDecoder::Bytes(show) => show(&bytes[at / 8..(at + self.width) / 8]),
            FieldDecoder::Bits(show) => show(
                (at..at + self.width)
                    .rev()
                    .fold(0, |word, bit| word << 1 | u64::from(bytes[bit / 8] >> (bit % 8) & 1)),
            ),
        }
    }
}

/// Formats the fields that are not zero, which keeps a 4 KiB page readable in a failed assertion.
pub fn debug_nonzero_fields<T: Layout>(structure: &T, out: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut shown = out.debug_struct(T::NAME);
    for field in structure.decode_fields().iter().filter(|field| !field.value.is_zero()) {
        shown.field(field.name, &format_args!("{}", field.value));
    }
    shown.finish()
}

/// Extracts `width` bits of `word` from bit `low` on.
#[inline(always)]
#[must_use]
pub const fn extract_bits(word: u64, low: u32, width: u32) -> u64 {
    (word >> low) & low_bits_mask(width)
}

/// Replaces `width` bits of `word` from bit `low` on by `value`.
#[inline(always)]
#[must_use]
pub const fn with_bits(word: u64, low: u32, width: u32, value: u64) -> u64 {
    debug_assert!(value & !low_bits_mask(width) == 0, "the value is wider than its field");
    (word & !(low_bits_mask(width) << low)) | ((value & low_bits_mask(width)) << low)
}

/// Word with the lowest `width` bits set.
#[inline(always)]
#[must_use]
pub const fn low_bits_mask(width: u32) -> u64 {
    if width >= 64 { u64::MAX } else { (1 << width) - 1 }
}

/// Extracts the bits from the first to the last of `ends`, inclusive.
#[inline(always)]
pub(crate) fn extract_bit_range<W: BitFieldType, P: BitFieldType>(word: W, ends: &[u32]) -> P {
    P::from_bits(extract_bits(word.to_bits(), ends[0], bit_range_width(ends)))
}

/// Replaces the bits from the first to the last of `ends`, inclusive.
#[inline(always)]
pub(crate) fn with_bit_range<W: BitFieldType, P: BitFieldType>(
    word: W,
    ends: &[u32],
    value: P,
) -> W {
    W::from_bits(with_bits(word.to_bits(), ends[0], bit_range_width(ends), value.to_bits()))
}

/// Number of bits from the first to the last of `ends`, inclusive.
#[doc(hidden)]
#[inline(always)]
#[must_use]
pub const fn bit_range_width(ends: &[u32]) -> u32 {
    ends[ends.len() - 1] - ends[0] + 1
}

/// Joins a field's doc comment to one line.
#[doc(hidden)]
#[must_use]
pub const fn join_doc_lines(text: &'static str) -> &'static str {
    text.trim_ascii()
}

#[cfg(test)]
mod tests {
    #![allow(unreachable_pub, dead_code, reason = "the macro serves public modules")]

    use super::{FieldValue, Layout, layout};

    layout! {
        /// A made-up page.
        struct Page[8] {
            /// A number of two bytes.
            size @ 0: u16;
            /// A word of flags.
            flags @ 2: u8 {
                /// One bit.
                ready @ 0: bool;
                /// Three bits.
                level @ 1..=3: u8;
            };
            /// Four elements side by side.
            samples @ 4: u8[4];
        }
    }

    #[test]
    fn layout_macro_generates_accessors() {
        let page = Page::zeroed().with(|page| page.size(7).ready(true).level(5).samples(2, 9));
        assert_eq!(page.as_bytes(), &[7, 0, 0b1011, 0, 0, 0, 9, 0]);
        assert_eq!((page.size(), page.ready(), page.level()), (7, true, 5));
        assert_eq!((page.flags(), page.samples(2), page.samples(4)), (0b1011, Some(9), None));
        assert_eq!(Page::from_bytes(page.as_bytes()), page);
    }

    #[test]
    fn layout_macro_generates_the_field_table() {
        let page = Page::zeroed().with(|page| page.size(7).level(2));
        let decoded = page.decode_fields();
        assert_eq!((decoded[0].name, decoded[0].description), ("size", "A number of two bytes."));
        assert_eq!(decoded[0].value, FieldValue::Number(7));
        assert_eq!(decoded[1].parts[1].value, FieldValue::Number(2));
        assert_eq!(decoded[2].value.to_string(), "[0x0, 0x0, 0x0, 0x0]");
        assert_eq!(format!("{page:?}"), "Page { size: 0x7, flags: 0x4 }");
    }

    #[test]
    fn truncated_structure_is_rejected_with_both_lengths() {
        let short = Page::parse(&[0; 7]).unwrap_err();
        assert_eq!(short.to_string(), "parse Page: 7 bytes, expected at least 8");
        assert!(Page::parse(&[0; 9]).is_ok());
    }
}
