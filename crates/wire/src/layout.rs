//! One declaration per structure: accessors, a field table and the tests come from it.
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
//! `struct Name[N]` is N bytes of little-endian memory, offsets are bytes. `struct Name(u32)` is
//! one register or dword, offsets are bits. Both implement [`Layout`], so one function prints
//! every structure and one test visits every bit of every field.
//!
//! Setters live on [`Set`], which is what `set()` returns and what `with()` gives to its closure.

use core::fmt;

mod declare;

pub(crate) use declare::layout;

pub use crate::element::{Ascii, Element, Kind, Part};

/// A structure whose fields are declared with `layout!`.
pub trait Layout: Clone + Sized + 'static {
    /// The structure's name.
    const NAME: &'static str;
    /// Its length on the wire.
    const BYTES: usize;
    /// Its fields, in the order of declaration.
    const FIELDS: &'static [Field];
    /// The accessors of the fields, in the same order.
    #[cfg(test)]
    const ACCESSORS: &'static [Accessor<Self>];

    /// Takes the structure out of the first [`Self::BYTES`] bytes.
    fn parse(bytes: &[u8]) -> Result<Self, Short>;

    /// The structure as it lies on the wire.
    fn bytes(&self) -> Vec<u8>;

    /// Every field with its value, for printing.
    fn decode(&self) -> Vec<Decoded> {
        decode(&self.bytes(), Self::FIELDS)
    }
}

/// Something to be done with every structure there is.
pub trait Visitor {
    /// Does it with one.
    fn visit<T: Layout + PartialEq + fmt::Debug>(&mut self);
}

/// One field of a structure.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// The field's name, as its accessor is called.
    pub name: &'static str,
    /// What it means, in one line.
    pub meaning: &'static str,
    /// Where it begins, in bits from the start of the structure.
    pub bit: usize,
    /// How wide it is, or each of its elements.
    pub width: usize,
    /// How many elements there are: 1 unless the field is an array.
    pub count: usize,
    /// Whether the field is an array, even one of a single element.
    pub repeated: bool,
    /// How its bits are to be read.
    pub kind: Kind,
    /// What its bits say.
    pub show: Show,
    /// The named parts of a word.
    pub parts: &'static [Field],
}

/// How a field's bits become a value.
#[derive(Clone, Copy, Debug)]
pub enum Show {
    /// It fills whole bytes.
    Bytes(fn(&[u8]) -> Value),
    /// It is some bits of a word, 64 at most.
    Bits(fn(u64) -> Value),
}

/// A field's getter and setter, as a test can call them.
#[cfg(test)]
#[derive(Debug)]
pub struct Accessor<T: 'static> {
    /// Takes the raw bits of element `index` out, through the public getter.
    pub raw: fn(&T, usize, &mut [u8]),
    /// Puts raw bits into element `index`, through the public setter.
    pub put: fn(&mut T, usize, &[u8]),
    /// Those of the named parts of a word.
    pub parts: &'static [Accessor<T>],
}

/// Setters of a structure, chained.
#[derive(Debug)]
pub struct Set<'a, T>(
    /// The structure being written.
    pub &'a mut T,
);

/// What a field holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// One bit.
    Flag(bool),
    /// An unsigned number.
    Number(u128),
    /// A code and the name the specification gives it.
    Code(u64, &'static str),
    /// Text, without its padding.
    Text(String),
    /// Bytes with no meaning of their own.
    Bytes(Vec<u8>),
    /// Another structure.
    Structure(Vec<Decoded>),
    /// An array.
    List(Vec<Value>),
}

/// One line of a decoded structure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// The field's name.
    pub name: &'static str,
    /// What it means.
    pub meaning: &'static str,
    /// What it holds.
    pub value: Value,
    /// The parts of a word of flags, if it is one.
    pub parts: Vec<Decoded>,
}

/// A structure that is longer than the bytes there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Short {
    /// Which structure.
    pub what: &'static str,
    /// How many bytes there are.
    pub got_bytes: usize,
    /// How many it takes.
    pub need_bytes: usize,
}

impl Short {
    /// `Ok` when `got_bytes` suffice for `need_bytes` of `what`.
    pub const fn check(
        what: &'static str,
        got_bytes: usize,
        need_bytes: usize,
    ) -> Result<(), Self> {
        if got_bytes < need_bytes { Err(Self { what, got_bytes, need_bytes }) } else { Ok(()) }
    }
}

impl fmt::Display for Short {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, got_bytes, need_bytes } = self;
        write!(out, "parse {what}: {got_bytes} bytes, expected at least {need_bytes}")
    }
}

impl core::error::Error for Short {}

impl Value {
    /// Whether every bit is zero: what a printer may leave out.
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

impl fmt::Display for Value {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => write!(out, "{}", u8::from(*flag)),
            Self::Number(number) => write!(out, "{number:#x}"),
            Self::Code(code, name) => write!(out, "{code:#x} ({name})"),
            Self::Text(text) => write!(out, "{text:?}"),
            Self::Bytes(bytes) => bytes.iter().try_for_each(|byte| write!(out, "{byte:02x}")),
            Self::Structure(fields) => {
                let shown = fields.iter().filter(|field| !field.value.is_zero());
                write_joined(out, "{", shown.map(|field| (Some(field.name), &field.value)), "}")
            }
            Self::List(values) => {
                write_joined(out, "[", values.iter().map(|value| (None, value)), "]")
            }
        }
    }
}

fn write_joined<'a>(
    out: &mut fmt::Formatter<'_>,
    open: &str,
    items: impl Iterator<Item = (Option<&'a str>, &'a Value)>,
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

/// Every field of `fields` with its value in the structure that lies in `bytes`.
#[must_use]
pub fn decode(bytes: &[u8], fields: &[Field]) -> Vec<Decoded> {
    let whole = |field: &Field| Decoded {
        name: field.name,
        meaning: field.meaning,
        value: field.value(bytes),
        parts: decode(bytes, field.parts),
    };
    fields.iter().map(whole).collect()
}

impl Field {
    fn value(&self, bytes: &[u8]) -> Value {
        if self.repeated {
            Value::List((0..self.count).map(|index| self.element(bytes, index)).collect())
        } else {
            self.element(bytes, 0)
        }
    }

    pub(crate) fn element(&self, bytes: &[u8], index: usize) -> Value {
        let at = self.bit + index * self.width;
        match self.show {
            Show::Bytes(show) => show(&bytes[at / 8..(at + self.width) / 8]),
            Show::Bits(show) => show(
                (at..at + self.width)
                    .rev()
                    .fold(0, |word, bit| word << 1 | u64::from(bytes[bit / 8] >> (bit % 8) & 1)),
            ),
        }
    }
}

/// Writes the fields that are not zero, which keeps a page of 4 KiB readable in a failed assertion.
pub fn debug<T: Layout>(structure: &T, out: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut shown = out.debug_struct(T::NAME);
    for field in structure.decode().iter().filter(|field| !field.value.is_zero()) {
        shown.field(field.name, &format_args!("{}", field.value));
    }
    shown.finish()
}

/// Takes `width` bits out of `word`, beginning with bit `low`.
#[inline(always)]
#[must_use]
pub const fn bits(word: u64, low: u32, width: u32) -> u64 {
    (word >> low) & mask(width)
}

/// `word` with `width` bits from bit `low` on replaced by `value`.
#[inline(always)]
#[must_use]
pub const fn with_bits(word: u64, low: u32, width: u32, value: u64) -> u64 {
    debug_assert!(value & !mask(width) == 0, "the value is wider than its field");
    (word & !(mask(width) << low)) | ((value & mask(width)) << low)
}

/// The lowest `width` bits set.
#[inline(always)]
#[must_use]
pub const fn mask(width: u32) -> u64 {
    if width >= 64 { u64::MAX } else { (1 << width) - 1 }
}

/// The part of `word` that lies in the bits from the first to the last of `ends`, both included.
#[inline(always)]
pub(crate) fn part<W: Part, P: Part>(word: W, ends: &[u32]) -> P {
    P::from_bits(bits(word.to_bits(), ends[0], width_of(ends)))
}

/// `word` with the bits from the first to the last of `ends` replaced.
#[inline(always)]
pub(crate) fn with_part<W: Part, P: Part>(word: W, ends: &[u32], value: P) -> W {
    W::from_bits(with_bits(word.to_bits(), ends[0], width_of(ends), value.to_bits()))
}

/// How many bits there are from the first to the last of `ends`, both included.
#[doc(hidden)]
#[inline(always)]
#[must_use]
pub const fn width_of(ends: &[u32]) -> u32 {
    ends[ends.len() - 1] - ends[0] + 1
}

/// The one line that a field's doc comment is.
#[doc(hidden)]
#[must_use]
pub const fn line(text: &'static str) -> &'static str {
    text.trim_ascii()
}

#[cfg(test)]
mod tests {
    #![allow(unreachable_pub, dead_code, reason = "the macro serves public modules")]

    use super::{Layout, Value, layout};

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
    fn a_declaration_becomes_accessors() {
        let page = Page::zeroed().with(|page| page.size(7).ready(true).level(5).samples(2, 9));
        assert_eq!(page.as_bytes(), &[7, 0, 0b1011, 0, 0, 0, 9, 0]);
        assert_eq!((page.size(), page.ready(), page.level()), (7, true, 5));
        assert_eq!((page.flags(), page.samples(2), page.samples(4)), (0b1011, Some(9), None));
        assert_eq!(Page::from_bytes(page.as_bytes()), page);
    }

    #[test]
    fn a_declaration_becomes_a_table() {
        let page = Page::zeroed().with(|page| page.size(7).level(2));
        let decoded = page.decode();
        assert_eq!((decoded[0].name, decoded[0].meaning), ("size", "A number of two bytes."));
        assert_eq!(decoded[0].value, Value::Number(7));
        assert_eq!(decoded[1].parts[1].value, Value::Number(2));
        assert_eq!(decoded[2].value.to_string(), "[0x0, 0x0, 0x0, 0x0]");
        assert_eq!(format!("{page:?}"), "Page { size: 0x7, flags: 0x4 }");
    }

    #[test]
    fn too_few_bytes_are_refused_and_counted() {
        let short = Page::parse(&[0; 7]).unwrap_err();
        assert_eq!(short.to_string(), "parse Page: 7 bytes, expected at least 8");
        assert!(Page::parse(&[0; 9]).is_ok());
    }
}
