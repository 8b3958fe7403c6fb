//! Macros that declare codes and flags: a number with names for known values.

/// Declares code types. Any number is a valid value; some have a name.
macro_rules! codes {
    ($(
        $(#[$meta:meta])*
        pub struct $name:ident($number:ty) in $section:literal {
            $( $(#[$doc:meta])* $constant:ident = $code:literal $text:literal; )+
        }
    )+) => {$(
        $(#[$meta])*
        #[doc = concat!("\n\nThe numbers are in section \"", $section, "\".")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $number);

        impl $name {
            $( $(#[$doc])* pub const $constant: Self = Self($code); )+

            /// All named values, with their names in the protocol.
            pub const NAMED: &'static [(Self, &'static str)] = &[$((Self::$constant, $text)),+];

            /// Name in the protocol, if it has one.
            #[must_use]
            pub fn name(self) -> Option<&'static str> {
                Self::NAMED.iter().find(|(value, _)| *value == self).map(|(_, name)| *name)
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => out.write_str(name),
                    None => write!(out, "{:#x}", self.0),
                }
            }
        }
    )+};
}

/// Declares flag types: bit sets, of which some bits have a name.
macro_rules! flags {
    ($(
        $(#[$meta:meta])*
        pub struct $name:ident($number:ty) in $section:literal {
            $( $(#[$doc:meta])* $constant:ident = $bit:literal $text:literal; )+
        }
    )+) => {$(
        $(#[$meta])*
        #[doc = concat!("\n\nThe bits are in section \"", $section, "\".")]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub $number);

        impl $name {
            /// No flags.
            pub const NONE: Self = Self(0);
            $( $(#[$doc])* pub const $constant: Self = Self(1 << $bit); )+

            /// All named flags, with their names in the protocol.
            pub const NAMED: &'static [(Self, &'static str)] = &[$((Self::$constant, $text)),+];

            /// Whether every flag of `other` is set.
            #[inline]
            #[must_use]
            pub const fn has(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// Union of both sets of flags.
            #[inline]
            #[must_use]
            pub const fn union(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// These flags, with `other` if `wanted`.
            #[must_use]
            pub const fn union_if(self, wanted: bool, other: Self) -> Self {
                if wanted { self.union(other) } else { self }
            }

            /// These flags without those of `other`.
            #[inline]
            #[must_use]
            pub const fn without(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }
        }
    )+};
}

pub(crate) use {codes, flags};
