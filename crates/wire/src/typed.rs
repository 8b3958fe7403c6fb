//! One declaration per command: a structure of named fields, to and from a [`Command`].
//!
//! ```
//! # use tenmil_wire as wire;
//! use wire::Typed;
//! use wire::admin::Identify;
//!
//! let identify = Identify { cns: 0x01, ..Identify::default() };
//! let command = identify.to_command();
//! assert_eq!((command.opcode(), command.cdw10()), (0x06, 0x01));
//! assert_eq!(Identify::parse(&command), Ok(identify));
//! ```
//!
//! A command's data pointer, identifier and fuse are not among its fields: they belong to whoever
//! queues it. A field that is wider than its place is cut in a release build and a panic in a debug
//! build.

use core::fmt;

use crate::command::Command;
#[cfg(test)]
use crate::layout::Accessor;
use crate::layout::{Decoded, Field, decode};
use crate::opcode::FabricsType;
use crate::status::Status;

/// A command with a structure of its own.
pub trait Typed: Copy + Default + PartialEq + fmt::Debug + 'static {
    /// The command's name.
    const NAME: &'static str;
    /// Its opcode.
    const OPCODE: u8;
    /// FCTYPE, if it is a fabrics command.
    const FCTYPE: Option<FabricsType>;
    /// Its fields; bits are counted from the beginning of the 64 bytes.
    const FIELDS: &'static [Field];
    /// How a test reads and writes the fields, in the same order.
    #[cfg(test)]
    const ACCESSORS: &'static [Accessor<Self>];

    /// The command, without identifier and data pointer.
    fn to_command(&self) -> Command;

    /// Takes the fields out of a command. Reserved bits are ignored.
    ///
    /// `Status::INVALID_OPCODE` if it is another command.
    fn parse(command: &Command) -> Result<Self, Status>;

    /// `command` with the opcode, and FCTYPE, of this one.
    #[inline]
    fn adopt(command: Command) -> Command {
        let command = command.with_opcode(Self::OPCODE);
        match Self::FCTYPE {
            Some(fctype) => command.with_bits(FCTYPE_BIT, 8, fctype.code().into()),
            None => command,
        }
    }

    /// Whether the command has the FCTYPE of this one; yes, if this one has none.
    #[doc(hidden)]
    #[inline]
    fn has_fctype(command: &Command) -> bool {
        Self::FCTYPE.is_none_or(|own| command.bits(FCTYPE_BIT, 8) == u64::from(own.code()))
    }

    /// Every field with its value, for printing.
    fn decode(&self) -> Vec<Decoded> {
        decode(&self.to_command().to_bytes(), Self::FIELDS)
    }
}

/// Something to be done with every command there is.
pub trait CommandVisitor {
    /// Does it with one.
    fn visit<T: Typed>(&mut self);
}

/// The first bit of FCTYPE, which takes the place of NSID's low byte (Base 2.1 §6).
#[doc(hidden)]
pub const FCTYPE_BIT: usize = 32;

/// The first bit of dword `dword` of a command.
#[doc(hidden)]
#[must_use]
pub const fn bit_of(dword: usize, low: u32) -> usize {
    dword * 32 + low as usize
}

/// Declares the commands of one module.
///
/// `field @ 10[0..=7]: u8` is bits 7 to 0 of CDW10. A range may reach into the next dwords. A fabrics
/// command has an FCTYPE behind its opcode: `pub struct Connect = OPCODE, fabrics FCTYPE, "Connect"`.
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
                    Self { $( $field: $crate::layout::Part::from_bits(0), )* }
                }
            }

            impl $crate::typed::Typed for $name {
                const NAME: &'static str = $opcode_name;
                const OPCODE: u8 = $opcode.code();
                const FCTYPE: Option<$crate::opcode::FabricsType> =
                    $crate::typed::fctype!($($fctype)?);
                const FIELDS: &'static [$crate::layout::Field] = &[$(
                    $crate::layout::Field {
                        name: stringify!($field),
                        meaning: $crate::layout::line(concat!($($meaning),+)),
                        bit: $crate::typed::bit_of($dword, $low),
                        width: $crate::layout::width_of(&[$low $(, $high)?]) as usize,
                        count: 1,
                        repeated: false,
                        kind: <$type as $crate::layout::Part>::KIND,
                        show: $crate::layout::Show::Bits(<$type as $crate::layout::Part>::show),
                        parts: &[],
                    },
                )*];
                #[cfg(test)]
                const ACCESSORS: &'static [$crate::layout::Accessor<Self>] = &[$(
                    $crate::layout::Accessor {
                        raw: |it, _, raw| {
                            let bits = $crate::layout::Part::to_bits(it.$field);
                            $crate::layout::Element::store(&bits, raw);
                        },
                        put: |it, _, raw| {
                            it.$field = $crate::layout::Part::from_bits(
                                <u64 as $crate::layout::Element>::load(raw),
                            );
                        },
                        parts: &[],
                    },
                )*];

                #[inline]
                fn to_command(&self) -> $crate::command::Command {
                    <Self as $crate::typed::Typed>::adopt($crate::command::Command::new(0))
                        $(.with_bits(
                            $crate::typed::bit_of($dword, $low),
                            const { $crate::layout::width_of(&[$low $(, $high)?]) },
                            $crate::layout::Part::to_bits(self.$field),
                        ))*
                }

                #[inline]
                fn parse(command: &$crate::command::Command) -> Result<Self, $crate::status::Status> {
                    if command.opcode() != Self::OPCODE || !<Self as $crate::typed::Typed>::has_fctype(command) {
                        return Err($crate::status::Status::INVALID_OPCODE);
                    }
                    Ok(Self {
                        $( $field: $crate::layout::Part::from_bits(command.bits(
                            $crate::typed::bit_of($dword, $low),
                            const { $crate::layout::width_of(&[$low $(, $high)?]) },
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

/// FCTYPE as it is declared, or none.
macro_rules! fctype {
    () => {
        None
    };
    ($fctype:expr) => {
        Some($fctype)
    };
}

pub(crate) use {commands, fctype};
