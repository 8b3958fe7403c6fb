//! Field types: integers, bytes, text, codes.
//!
//! A [`FieldType`] fills whole bytes; a [`BitFieldType`] is some bits of a word.

use core::fmt;

use crate::layout::FieldValue;

/// Interpretation of a field's bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldKind {
    /// One bit.
    Flag,
    /// An unsigned number.
    Number,
    /// Code with a name in the specification.
    Code,
    /// Text, padded with spaces.
    Text,
    /// Bytes.
    Bytes,
    /// Another structure.
    Structure,
}

/// Type that fills whole bytes of a structure.
pub trait FieldType: Sized {
    /// Length in bytes.
    const BYTES: usize;
    /// Interpretation.
    const KIND: FieldKind;

    /// Loads it from the first [`Self::BYTES`] bytes, which must exist.
    fn load(bytes: &[u8]) -> Self;

    /// Stores it to the first [`Self::BYTES`] bytes, which must exist.
    fn store(&self, bytes: &mut [u8]);

    /// Value for printing.
    fn value(&self) -> FieldValue;

    /// Loads it from the bytes at `at`, which must exist.
    #[inline(always)]
    fn load_at(bytes: &[u8], at: usize) -> Self {
        Self::load(&bytes[at..at + Self::BYTES])
    }

    /// Stores it to the bytes at `at`, which must exist.
    #[inline(always)]
    fn store_at(&self, bytes: &mut [u8], at: usize) {
        self.store(&mut bytes[at..at + Self::BYTES]);
    }

    /// Value of the element in these bytes.
    fn decode_value(bytes: &[u8]) -> FieldValue {
        Self::load(bytes).value()
    }
}

/// Type that fills some bits of a word.
pub trait BitFieldType: Copy {
    /// Interpretation.
    const KIND: FieldKind;

    /// Decodes the low bits.
    fn from_bits(bits: u64) -> Self;

    /// Encodes to the low bits.
    fn to_bits(self) -> u64;

    /// Value for printing.
    fn value(self) -> FieldValue;

    /// Value of the part in these bits.
    fn decode_value(bits: u64) -> FieldValue {
        Self::from_bits(bits).value()
    }
}

/// Text of a fixed length: ASCII, padded with spaces on the right (Base 2.1 §4.5.2).
///
/// Received text is stored unchanged; only printing sanitizes it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ascii<const N: usize>(
    /// The bytes as received.
    pub [u8; N],
);

impl<const N: usize> Ascii<N> {
    /// Creates `text`, truncated or padded to fit; characters other than printable ASCII become
    /// question marks.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut bytes = [b' '; N];
        for (byte, letter) in bytes.iter_mut().zip(text.chars()) {
            *byte = u8::try_from(letter).ok().filter(is_printable).unwrap_or(b'?');
        }
        Self(bytes)
    }

    /// Creates `text`, truncated to fit and followed by zeros, as NQNs are (Base 2.1 §4.7).
    #[must_use]
    pub fn nul_padded(text: &str) -> Self {
        let mut bytes = [0; N];
        for (byte, letter) in bytes.iter_mut().zip(text.bytes()) {
            *byte = letter;
        }
        Self(bytes)
    }

    /// Text without padding.
    #[must_use]
    pub fn trimmed(&self) -> &[u8] {
        let padding = |byte: &u8| matches!(byte, b' ' | 0);
        let end = self.0.iter().rposition(|byte| !padding(byte)).map_or(0, |last| last + 1);
        &self.0[..end]
    }
}

fn is_printable(byte: &u8) -> bool {
    matches!(byte, b' '..=b'~')
}

impl<const N: usize> fmt::Display for Ascii<N> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |byte: &u8| if is_printable(byte) { char::from(*byte) } else { '.' };
        out.pad(&self.trimmed().iter().map(shown).collect::<String>())
    }
}

impl<const N: usize> fmt::Debug for Ascii<N> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?}", self.to_string())
    }
}

impl<const N: usize> FieldType for Ascii<N> {
    const BYTES: usize = N;
    const KIND: FieldKind = FieldKind::Text;

    #[inline]
    fn load(bytes: &[u8]) -> Self {
        Self(FieldType::load(bytes))
    }

    #[inline]
    fn store(&self, bytes: &mut [u8]) {
        self.0.store(bytes);
    }

    fn value(&self) -> FieldValue {
        FieldValue::Text(self.to_string())
    }
}

impl<const N: usize> FieldType for [u8; N] {
    const BYTES: usize = N;
    const KIND: FieldKind = FieldKind::Bytes;

    #[inline]
    fn load(bytes: &[u8]) -> Self {
        let mut loaded = [0; N];
        loaded.copy_from_slice(&bytes[..N]);
        loaded
    }

    #[inline]
    fn store(&self, bytes: &mut [u8]) {
        bytes[..N].copy_from_slice(self);
    }

    fn value(&self) -> FieldValue {
        FieldValue::Bytes(self.to_vec())
    }
}

macro_rules! numbers {
    ($($type:ty)*) => {$(
        impl FieldType for $type {
            const BYTES: usize = size_of::<$type>();
            const KIND: FieldKind = FieldKind::Number;

            #[inline]
            fn load(bytes: &[u8]) -> Self {
                let mut loaded = [0; size_of::<$type>()];
                loaded.copy_from_slice(&bytes[..size_of::<$type>()]);
                Self::from_le_bytes(loaded)
            }

            #[inline]
            fn store(&self, bytes: &mut [u8]) {
                bytes[..size_of::<$type>()].copy_from_slice(&self.to_le_bytes());
            }

            fn value(&self) -> FieldValue {
                FieldValue::Number(u128::from(*self))
            }
        }
    )*};
}

numbers! { u8 u16 u32 u64 u128 }

macro_rules! parts {
    ($($type:ty)*) => {$(
        impl BitFieldType for $type {
            const KIND: FieldKind = FieldKind::Number;

            #[inline(always)]
            #[allow(clippy::cast_possible_truncation, reason = "a part's low bits are the part")]
            fn from_bits(bits: u64) -> Self {
                bits as Self
            }

            #[inline(always)]
            fn to_bits(self) -> u64 {
                u64::from(self)
            }

            fn value(self) -> FieldValue {
                FieldValue::Number(u128::from(self))
            }
        }
    )*};
}

parts! { u8 u16 u32 u64 }

impl BitFieldType for bool {
    const KIND: FieldKind = FieldKind::Flag;

    #[inline(always)]
    fn from_bits(bits: u64) -> Self {
        bits != 0
    }

    #[inline(always)]
    fn to_bits(self) -> u64 {
        u64::from(self)
    }

    fn value(self) -> FieldValue {
        FieldValue::Flag(self)
    }
}

/// Declares a code: an enumeration that preserves unnamed values.
///
/// ```text
/// code! {
///     /// A made-up code.
///     pub enum Fruit {
///         /// Apple.
///         Apple = 1,
///     }
/// }
/// assert_eq!((Fruit::from_code(1), Fruit::from_code(9)), (Fruit::Apple, Fruit::Reserved(9)));
/// ```
macro_rules! code {
    ($(
        $(#[$meta:meta])*
        pub enum $name:ident {
            $( $(#[doc = $meaning:literal])+ $variant:ident = $code:literal, )+
        }
    )*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $( $(#[doc = $meaning])+ $variant, )+
            /// A value that the specification does not name.
            Reserved(u8),
        }

        impl $name {
            /// All named values.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Decodes a value; an unnamed one is preserved in `Reserved`.
            #[inline]
            #[must_use]
            pub const fn from_code(code: u8) -> Self {
                match code {
                    $($code => Self::$variant,)+
                    other => Self::Reserved(other),
                }
            }

            /// Value on the wire.
            #[inline]
            #[must_use]
            pub const fn code(self) -> u8 {
                match self {
                    $(Self::$variant => $code,)+
                    Self::Reserved(other) => other,
                }
            }

            /// Meaning, in one line.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $crate::layout::join_doc_lines(concat!($($meaning),+)),)+
                    Self::Reserved(_) => "reserved",
                }
            }
        }

        impl $crate::layout::BitFieldType for $name {
            const KIND: $crate::layout::FieldKind = $crate::layout::FieldKind::Code;

            #[inline]
            #[allow(clippy::cast_possible_truncation, reason = "codes are at most 8 bits wide")]
            fn from_bits(bits: u64) -> Self {
                Self::from_code(bits as u8)
            }

            #[inline]
            fn to_bits(self) -> u64 {
                u64::from(self.code())
            }

            fn value(self) -> $crate::layout::FieldValue {
                $crate::layout::FieldValue::Code(u64::from(self.code()), self.name())
            }
        }

        impl $crate::layout::FieldType for $name {
            const BYTES: usize = 1;
            const KIND: $crate::layout::FieldKind = $crate::layout::FieldKind::Code;

            #[inline]
            fn load(bytes: &[u8]) -> Self {
                Self::from_code(bytes[0])
            }

            #[inline]
            fn store(&self, bytes: &mut [u8]) {
                bytes[0] = self.code();
            }

            fn value(&self) -> $crate::layout::FieldValue {
                $crate::layout::BitFieldType::value(*self)
            }
        }
    )*};
}

pub(crate) use code;

#[cfg(test)]
mod tests {
    use super::Ascii;

    #[test]
    fn ascii_text_is_padded_and_truncated_and_unprintable_bytes_replaced() {
        assert_eq!(&Ascii::<6>::new("abc").0, b"abc   ");
        assert_eq!(&Ascii::<2>::new("abc").0, b"ab");
        assert_eq!(&Ascii::<3>::new("aé\n").0, b"a??");
        assert_eq!(&Ascii::<4>::nul_padded("nqn").0, b"nqn\0");
    }

    #[test]
    fn ascii_display_trims_padding_and_hides_unprintable_bytes() {
        assert_eq!(Ascii(*b"ab\x07c \0 ").to_string(), "ab.c");
        assert_eq!(Ascii([0; 4]).to_string(), "");
    }
}
