//! Typed commands: one declaration per command, converted to and from a [`Command`].
//!
//! ```
//! # use tenmil_wire as wire;
//! use tenmil_wire::TypedCommand;
//! use tenmil_wire::admin::Identify;
//!
//! let identify = Identify { cns: 0x01, ..Identify::default() };
//! let command = identify.to_command();
//! assert_eq!((command.opcode(), command.cdw10()), (0x06, 0x01));
//! assert_eq!(Identify::parse(&command), Ok(identify));
//! ```
//!
//! Data pointer, command identifier and fuse are not among the fields: the code that queues the
//! command sets them. A value wider than its field is truncated in a release build and panics in a
//! debug build.

use core::fmt;

use crate::command::Command;
#[cfg(test)]
use crate::layout::FieldAccessor;
use crate::layout::{DecodedField, Field, decode};
use crate::opcode::FabricsType;
use crate::status::Status;

/// Command with named fields.
pub trait TypedCommand: Copy + Default + PartialEq + fmt::Debug + 'static {
    /// Name of the command.
    const NAME: &'static str;
    /// Opcode.
    const OPCODE: u8;
    /// FCTYPE, if it is a fabrics command.
    const FCTYPE: Option<FabricsType>;
    /// Fields; bits are counted from the beginning of the 64 bytes.
    fn fields() -> &'static [Field];
    /// Accessors for tests, in the same order.
    #[cfg(test)]
    const ACCESSORS: &'static [FieldAccessor<Self>];

    /// Encodes the command, without command identifier and data pointer.
    fn to_command(&self) -> Command;

    /// Decodes a command. Reserved bits are ignored.
    ///
    /// Returns `Status::INVALID_OPCODE` for another command.
    fn parse(command: &Command) -> Result<Self, Status>;

    /// Sets the opcode, and FCTYPE, of this command in `command`.
    #[inline]
    fn with_opcode_of(command: Command) -> Command {
        let command = command.with_opcode(Self::OPCODE);
        match Self::FCTYPE {
            Some(fctype) => command.with_bits(FCTYPE_BIT, 8, fctype.code().into()),
            None => command,
        }
    }

    /// Whether the command has the FCTYPE of this one; always true if this one has none.
    #[doc(hidden)]
    #[inline]
    fn matches_fctype(command: &Command) -> bool {
        Self::FCTYPE.is_none_or(|own| command.bits(FCTYPE_BIT, 8) == u64::from(own.code()))
    }

    /// All fields with their values, for printing.
    fn decode_fields(&self) -> Vec<DecodedField> {
        decode(&self.to_command().to_bytes(), Self::fields())
    }
}

/// Visitor called for every typed command.
pub trait CommandVisitor {
    /// Visits one command.
    fn visit<T: TypedCommand>(&mut self);
}

/// First bit of FCTYPE, which occupies the low byte of NSID (Base 2.1 §6).
#[doc(hidden)]
pub const FCTYPE_BIT: usize = 32;

/// First bit of dword `dword` of a command.
#[doc(hidden)]
#[must_use]
pub const fn dword_bit_index(dword: usize, low: u32) -> usize {
    dword * 32 + low as usize
}

/// Declares the commands of one module.
///
/// `field @ 10[0..=7]: u8` is bits 7 to 0 of CDW10. A range may extend into the next dwords. A
/// fabrics command has an FCTYPE after its opcode: `pub struct Connect = OPCODE, fabrics FCTYPE,
/// "Connect"`.
macro_rules! commands {
    ($(
        $(#[$meta:meta])*
        pub struct $name:ident = $opcode:expr $(, fabrics $fctype:expr)?, $opcode_name:literal {
            $(
                $(#[doc = $meaning:literal])+
                $field:ident @ $dword:literal [$low:literal $(..= $high:literal)?] : $type:ty;
            )*
        }
    )*) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct $name {
                $( $(#[doc = $meaning])+ pub $field: $type, )*
            }

            impl Default for $name {
                #[inline]
                fn default() -> Self {
                    Self { $( $field: $crate::layout::BitFieldType::from_bits(0), )* }
                }
            }

            impl $crate::typed::TypedCommand for $name {
                const NAME: &'static str = $opcode_name;
                const OPCODE: u8 = $opcode.code();
                const FCTYPE: Option<$crate::opcode::FabricsType> =
                    $crate::typed::fctype!($($fctype)?);
                fn fields() -> &'static [$crate::layout::Field] {
                    static FIELDS: &[$crate::layout::Field] = &[$(
                    $crate::layout::Field {
                        name: stringify!($field),
                        description: $crate::layout::join_doc_lines(concat!($($meaning),+)),
                        bit: $crate::typed::dword_bit_index($dword, $low),
                        width: $crate::layout::bit_range_width(&[$low $(, $high)?]) as usize,
                        count: 1,
                        repeated: false,
                        kind: <$type as $crate::layout::BitFieldType>::KIND,
                        show: $crate::layout::FieldDecoder::Bits(<$type as $crate::layout::BitFieldType>::decode_value),
                        parts: &[],
                    },
                )*];
                    FIELDS
                }
                #[cfg(test)]
                const ACCESSORS: &'static [$crate::layout::FieldAccessor<Self>] = &[$(
                    $crate::layout::FieldAccessor {
                        raw: |it, _, raw| {
                            let bits = $crate::layout::BitFieldType::to_bits(it.$field);
                            $crate::layout::FieldType::store(&bits, raw);
                        },
                        put: |it, _, raw| {
                            it.$field = $crate::layout::BitFieldType::from_bits(
                                <u64 as $crate::layout::FieldType>::load(raw),
                            );
                        },
                        parts: &[],
                    },
                )*];

                #[inline]
                fn to_command(&self) -> $crate::command::Command {
                    <Self as $crate::typed::TypedCommand>::with_opcode_of($crate::command::Command::new(0))
                        $(.with_bits(
                            $crate::typed::dword_bit_index($dword, $low),
                            const { $crate::layout::bit_range_width(&[$low $(, $high)?]) },
                            $crate::layout::BitFieldType::to_bits(self.$field),
                        ))*
                }

                #[inline]
                fn parse(command: &$crate::command::Command) -> Result<Self, $crate::status::Status> {
                    if command.opcode() != Self::OPCODE || !<Self as $crate::typed::TypedCommand>::matches_fctype(command) {
                        return Err($crate::status::Status::INVALID_OPCODE);
                    }
                    Ok(Self {
                        $( $field: $crate::layout::BitFieldType::from_bits(command.bits(
                            $crate::typed::dword_bit_index($dword, $low),
                            const { $crate::layout::bit_range_width(&[$low $(, $high)?]) },
                        )), )*
                    })
                }
            }
        )*

        /// Visits every command that this module declares.
        pub(crate) fn visit_commands(visitor: &mut impl $crate::typed::CommandVisitor) {
            $( visitor.visit::<$name>(); )*
        }
    };
}

/// FCTYPE as declared, or `None`.
macro_rules! fctype {
    () => {
        None
    };
    ($fctype:expr) => {
        Some($fctype)
    };
}

pub(crate) use {commands, fctype};
