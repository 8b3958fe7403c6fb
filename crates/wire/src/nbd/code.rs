//! How codes and flags are declared: a number with the names of the values that have one.

/// Declares types of codes. Whatever number arrives has a value; some have a name.
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

            /// Every value that has a name, and the name that the protocol gives it.
            pub const NAMED: &'static [(Self, &'static str)] = &[$((Self::$constant, $text)),+];

            /// Its name in the protocol, if it has one.
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

/// Declares types of flags: sets of bits, some of which have a name.
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
            /// No flag.
            pub const NONE: Self = Self(0);
            $( $(#[$doc])* pub const $constant: Self = Self(1 << $bit); )+

            /// Every flag that has a name, and the name that the protocol gives it.
            pub const NAMED: &'static [(Self, &'static str)] = &[$((Self::$constant, $text)),+];

            /// Whether every flag of `other` is set.
            #[inline]
            #[must_use]
            pub const fn has(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// Both sets of flags.
            #[inline]
            #[must_use]
            pub const fn and(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// These flags, and `other` if `wanted`.
            #[must_use]
            pub const fn and_if(self, wanted: bool, other: Self) -> Self {
                if wanted { self.and(other) } else { self }
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
