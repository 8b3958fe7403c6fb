//! The `layout!` macro.
//!
//! A field may be an element or an array, and its word may have named parts; so there is one rule
//! for bytes in memory, one for a single word, and internal ones for the pieces.

/// Declares a structure; see the [module](crate::layout) for an example.
macro_rules! layout {
    // After the last structure: the visitor of all structures of a module.
    (@structures [$($done:ident)*]) => {
        /// Visits every structure that this module declares.
        pub(crate) fn visit(visitor: &mut impl $crate::layout::LayoutVisitor) {
            $( visitor.visit::<$done>(); )*
        }
    };

    // Bytes in memory.
    (
        @structures [$($done:ident)*]
        $(#[$meta:meta])*
        $visibility:vis struct $name:ident [ $bytes:literal ] {
            $(
                $(#[doc = $meaning:literal])+
                $field:ident @ $offset:literal : $type:ty $([$count:literal])? $({
                    $(
                        $(#[doc = $part_meaning:literal])+
                        $part:ident @ $low:literal $(..= $high:literal)? : $part_type:ty;
                    )*
                })?;
            )*
        }
        $($rest:tt)*
    ) => {
        $(#[$meta])*
        #[derive(Clone, PartialEq, Eq)]
        $visibility struct $name([u8; $bytes]);

        impl $name {
            /// The structure's length on the wire.
            pub const BYTES: usize = $bytes;

            $(
                $crate::layout::layout!(@getter [$($meaning)+] $field $offset $type; $($count)?);
                $($(
                    $(#[doc = $part_meaning])+
                    #[inline]
                    #[must_use]
                    pub fn $part(&self) -> $part_type {
                        $crate::layout::extract_bit_range(self.$field(), &[$low $(, $high)?])
                    }
                )*)?
            )*

            /// The structure that lies in these bytes.
            #[inline]
            #[must_use]
            pub const fn from_bytes(bytes: &[u8; $bytes]) -> Self {
                Self(*bytes)
            }

            /// The bytes it lies in.
            #[inline]
            #[must_use]
            pub const fn as_bytes(&self) -> &[u8; $bytes] {
                &self.0
            }

            /// The bytes it lies in, to be written by a transfer.
            #[inline]
            pub const fn as_bytes_mut(&mut self) -> &mut [u8; $bytes] {
                &mut self.0
            }

            /// A structure with every bit clear.
            #[inline]
            #[must_use]
            pub const fn zeroed() -> Self {
                Self([0; $bytes])
            }
        }

        impl $crate::layout::FieldSetters<'_, $name> {
            $(
                $crate::layout::layout!(@setter $field $offset $type; $($count)?);
                $($(
                    #[doc = concat!("Sets `", stringify!($part), "`.")]
                    #[inline]
                    pub fn $part(self, value: $part_type) -> Self {
                        let word = $crate::layout::with_bit_range(
                            self.0.$field(), &[$low $(, $high)?], value,
                        );
                        self.$field(word)
                    }
                )*)?
            )*
        }

        impl $crate::layout::Layout for $name {
            const NAME: &'static str = stringify!($name);
            const BYTES: usize = $bytes;
            fn fields() -> &'static [$crate::layout::Field] {
                // A static: its evaluation is not part of the metadata that dependents read.
                static FIELDS: &[$crate::layout::Field] = &[$(
                    $crate::layout::Field {
                        parts: &[$($(
                            $crate::layout::layout!(
                                @part [$($part_meaning)+] $part $part_type; $offset * 8; $low $(, $high)?
                            ),
                        )*)?],
                        ..$crate::layout::layout!(
                            @field [$($meaning)+] $field $offset $type; $($count)?
                        )
                    },
                )*];
                FIELDS
            }
            #[cfg(test)]
            const ACCESSORS: &'static [$crate::layout::FieldAccessor<Self>] = &[$(
                $crate::layout::FieldAccessor {
                    parts: &[$($( $crate::layout::layout!(@part_accessor $part), )*)?],
                    ..$crate::layout::layout!(@accessor $field $type; $($count)?)
                },
            )*];

            fn parse(bytes: &[u8]) -> Result<Self, $crate::layout::TruncatedError> {
                match bytes.first_chunk::<$bytes>() {
                    Some(bytes) => Ok(Self(*bytes)),
                    None => Err($crate::layout::TruncatedError {
                        what: stringify!($name),
                        got_bytes: bytes.len(),
                        need_bytes: $bytes,
                    }),
                }
            }

            fn to_bytes(&self) -> Vec<u8> {
                self.0.to_vec()
            }
        }

        impl $crate::layout::FieldType for $name {
            const BYTES: usize = $bytes;
            const KIND: $crate::layout::FieldKind = $crate::layout::FieldKind::Structure;

            #[inline]
            fn load(bytes: &[u8]) -> Self {
                let mut loaded = [0; $bytes];
                loaded.copy_from_slice(&bytes[..$bytes]);
                Self(loaded)
            }

            #[inline]
            fn store(&self, bytes: &mut [u8]) {
                bytes[..$bytes].copy_from_slice(&self.0);
            }

            fn value(&self) -> $crate::layout::FieldValue {
                $crate::layout::FieldValue::Structure($crate::layout::Layout::decode_fields(self))
            }
        }

        $crate::layout::layout!(@common $name);
        $crate::layout::layout! { @structures [$($done)* $name] $($rest)* }
    };

    // One word: a register or a dword of a command.
    (
        @structures [$($done:ident)*]
        $(#[$meta:meta])*
        $visibility:vis struct $name:ident ( $word:ty ) {
            $(
                $(#[doc = $meaning:literal])+
                $part:ident @ $low:literal $(..= $high:literal)? : $type:ty;
            )*
        }
        $($rest:tt)*
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[repr(transparent)]
        $visibility struct $name(
            /// The whole word.
            pub $word,
        );

        impl $name {
            /// The word's length on the wire.
            pub const BYTES: usize = <$word as $crate::layout::FieldType>::BYTES;

            $(
                $(#[doc = $meaning])+
                #[inline]
                #[must_use]
                pub fn $part(&self) -> $type {
                    $crate::layout::extract_bit_range(self.0, &[$low $(, $high)?])
                }
            )*

            /// A word with every bit clear.
            #[inline]
            #[must_use]
            pub const fn zeroed() -> Self {
                Self(0)
            }
        }

        impl $crate::layout::FieldSetters<'_, $name> {
            $(
                #[doc = concat!("Sets `", stringify!($part), "`.")]
                #[inline]
                pub fn $part(self, value: $type) -> Self {
                    self.0.0 = $crate::layout::with_bit_range(self.0.0, &[$low $(, $high)?], value);
                    self
                }
            )*
        }

        impl $crate::layout::Layout for $name {
            const NAME: &'static str = stringify!($name);
            const BYTES: usize = <$word as $crate::layout::FieldType>::BYTES;
            fn fields() -> &'static [$crate::layout::Field] {
                static FIELDS: &[$crate::layout::Field] = &[$(
                    $crate::layout::layout!(@part [$($meaning)+] $part $type; 0; $low $(, $high)?),
                )*];
                FIELDS
            }
            #[cfg(test)]
            const ACCESSORS: &'static [$crate::layout::FieldAccessor<Self>] =
                &[$( $crate::layout::layout!(@part_accessor $part), )*];

            fn parse(bytes: &[u8]) -> Result<Self, $crate::layout::TruncatedError> {
                $crate::layout::TruncatedError::check_length(
                    stringify!($name), bytes.len(), <Self as $crate::layout::Layout>::BYTES,
                )?;
                Ok(<Self as $crate::layout::FieldType>::load(bytes))
            }

            fn to_bytes(&self) -> Vec<u8> {
                self.0.to_le_bytes().to_vec()
            }
        }

        impl $crate::layout::FieldType for $name {
            const BYTES: usize = <$word as $crate::layout::FieldType>::BYTES;
            const KIND: $crate::layout::FieldKind = $crate::layout::FieldKind::Structure;

            #[inline]
            fn load(bytes: &[u8]) -> Self {
                Self(<$word as $crate::layout::FieldType>::load(bytes))
            }

            #[inline]
            fn store(&self, bytes: &mut [u8]) {
                $crate::layout::FieldType::store(&self.0, bytes);
            }

            fn value(&self) -> $crate::layout::FieldValue {
                $crate::layout::FieldValue::Structure($crate::layout::Layout::decode_fields(self))
            }
        }

        impl $crate::layout::BitFieldType for $name {
            const KIND: $crate::layout::FieldKind = $crate::layout::FieldKind::Structure;

            #[inline(always)]
            fn from_bits(bits: u64) -> Self {
                Self($crate::layout::BitFieldType::from_bits(bits))
            }

            #[inline(always)]
            fn to_bits(self) -> u64 {
                u64::from(self.0)
            }

            fn value(self) -> $crate::layout::FieldValue {
                $crate::layout::FieldValue::Structure($crate::layout::Layout::decode_fields(&self))
            }
        }

        impl From<$word> for $name {
            #[inline]
            fn from(word: $word) -> Self {
                Self(word)
            }
        }

        impl From<$name> for $word {
            #[inline]
            fn from(word: $name) -> Self {
                word.0
            }
        }

        $crate::layout::layout!(@common $name);
        $crate::layout::layout! { @structures [$($done)* $name] $($rest)* }
    };

    (@common $name:ident) => {
        impl $name {
            /// Setters, to be chained.
            #[inline]
            pub const fn set(&mut self) -> $crate::layout::FieldSetters<'_, Self> {
                $crate::layout::FieldSetters(self)
            }

            /// The structure after `change`.
            #[inline]
            #[must_use]
            pub fn with(
                mut self,
                change: impl FnOnce($crate::layout::FieldSetters<'_, Self>) -> $crate::layout::FieldSetters<'_, Self>,
            ) -> Self {
                change($crate::layout::FieldSetters(&mut self));
                self
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                $crate::layout::debug_nonzero_fields(self, out)
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::zeroed()
            }
        }
    };

    (@getter [$($meaning:literal)+] $field:ident $offset:literal $type:ty;) => {
        $(#[doc = $meaning])+
        #[inline]
        #[must_use]
        pub fn $field(&self) -> $type {
            $crate::layout::FieldType::load_at(&self.0, $offset)
        }
    };
    (@getter [$($meaning:literal)+] $field:ident $offset:literal $type:ty; $count:literal) => {
        $(#[doc = $meaning])+
        ///
        /// `None` behind the last element.
        #[inline]
        #[must_use]
        pub fn $field(&self, index: usize) -> Option<$type> {
            (index < $count).then(|| {
                let at = $offset + index * <$type as $crate::layout::FieldType>::BYTES;
                $crate::layout::FieldType::load_at(&self.0, at)
            })
        }
    };

    (@setter $field:ident $offset:literal $type:ty;) => {
        #[doc = concat!("Sets `", stringify!($field), "`.")]
        #[inline]
        pub fn $field(self, value: $type) -> Self {
            $crate::layout::FieldType::store_at(&value, &mut self.0.0, $offset);
            self
        }
    };
    (@setter $field:ident $offset:literal $type:ty; $count:literal) => {
        #[doc = concat!("Sets one element of `", stringify!($field), "`.")]
        ///
        /// # Panics
        ///
        /// If there is no element of this index.
        #[inline]
        pub fn $field(self, index: usize, value: $type) -> Self {
            assert!(index < $count, concat!("no such element of ", stringify!($field)));
            let at = $offset + index * <$type as $crate::layout::FieldType>::BYTES;
            $crate::layout::FieldType::store_at(&value, &mut self.0.0, at);
            self
        }
    };

    (@field [$($meaning:literal)+] $field:ident $offset:literal $type:ty;) => {
        $crate::layout::Field {
            repeated: false,
            ..$crate::layout::layout!(@field [$($meaning)+] $field $offset $type; 1)
        }
    };
    (@field [$($meaning:literal)+] $field:ident $offset:literal $type:ty; $count:literal) => {
        $crate::layout::Field {
            name: stringify!($field),
            description: $crate::layout::join_doc_lines(concat!($($meaning),+)),
            bit: $offset * 8,
            width: <$type as $crate::layout::FieldType>::BYTES * 8,
            count: $count,
            repeated: true,
            kind: <$type as $crate::layout::FieldType>::KIND,
            show: $crate::layout::FieldDecoder::Bytes(<$type as $crate::layout::FieldType>::decode_value),
            parts: &[],
        }
    };
    (
        @part [$($meaning:literal)+] $part:ident $type:ty; $base:expr; $low:literal $(, $high:literal)?
    ) => {
        $crate::layout::Field {
            name: stringify!($part),
            description: $crate::layout::join_doc_lines(concat!($($meaning),+)),
            bit: $base + $low,
            width: $crate::layout::bit_range_width(&[$low $(, $high)?]) as usize,
            count: 1,
            repeated: false,
            kind: <$type as $crate::layout::BitFieldType>::KIND,
            show: $crate::layout::FieldDecoder::Bits(<$type as $crate::layout::BitFieldType>::decode_value),
            parts: &[],
        }
    };

    (@accessor $field:ident $type:ty;) => {
        $crate::layout::FieldAccessor {
            raw: |it, _, raw| $crate::layout::FieldType::store(&it.$field(), raw),
            put: |it, _, raw| {
                it.set().$field(<$type as $crate::layout::FieldType>::load(raw));
            },
            parts: &[],
        }
    };
    (@accessor $field:ident $type:ty; $count:literal) => {
        $crate::layout::FieldAccessor {
            raw: |it, index, raw| {
                if let Some(element) = it.$field(index) {
                    $crate::layout::FieldType::store(&element, raw);
                }
            },
            put: |it, index, raw| {
                it.set().$field(index, <$type as $crate::layout::FieldType>::load(raw));
            },
            parts: &[],
        }
    };
    (@part_accessor $part:ident) => {
        $crate::layout::FieldAccessor {
            raw: |it, _, raw| {
                $crate::layout::FieldType::store(&$crate::layout::BitFieldType::to_bits(it.$part()), raw);
            },
            put: |it, _, raw| {
                it.set().$part($crate::layout::BitFieldType::from_bits(
                    <u64 as $crate::layout::FieldType>::load(raw),
                ));
            },
            parts: &[],
        }
    };

    ($($structures:tt)*) => {
        $crate::layout::layout! { @structures [] $($structures)* }
    };
}

pub(crate) use layout;
