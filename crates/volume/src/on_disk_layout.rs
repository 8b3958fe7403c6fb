//! On-disk structures: one declaration provides fields, offsets, encoding and decoding.
//!
//! Fields are in declaration order, little-endian, without gaps, so an offset is never written
//! explicitly: it is the sum of the preceding lengths. For each declaration, a `const` assertion compares
//! the total with the declared length.

/// Structure declared with `layout!`.
pub trait Layout: Sized {
    /// Name, as in docs/developer/volume-format.md.
    const NAME: &'static str;
    /// Length on disk.
    const BYTES: usize;
    /// Names and lengths in bytes of its fields.
    const FIELDS: &'static [(&'static str, usize)];

    /// Decodes it from the first [`Self::BYTES`] bytes, which must exist.
    fn decode(bytes: &[u8]) -> Self;

    /// Encodes it into the first [`Self::BYTES`] bytes, which must exist.
    fn encode(&self, bytes: &mut [u8]);
}

/// Type of a field.
pub(crate) trait FieldScalar: Sized {
    /// Length in bytes.
    const WIDTH: usize;

    /// Decodes it from bytes of exactly that length.
    fn load(bytes: &[u8]) -> Self;

    /// Encodes it into bytes of exactly that length.
    fn store(&self, bytes: &mut [u8]);
}

macro_rules! numbers {
    ($($type:ty)*) => {$(
        impl FieldScalar for $type {
            const WIDTH: usize = size_of::<$type>();

            #[inline]
            fn load(bytes: &[u8]) -> Self {
                let mut raw = [0; size_of::<$type>()];
                raw.copy_from_slice(bytes);
                Self::from_le_bytes(raw)
            }

            #[inline]
            fn store(&self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}

numbers! { u8 u16 u32 u64 u128 }

impl<const N: usize> FieldScalar for [u8; N] {
    const WIDTH: usize = N;

    fn load(bytes: &[u8]) -> Self {
        let mut raw = [0; N];
        raw.copy_from_slice(bytes);
        raw
    }

    fn store(&self, bytes: &mut [u8]) {
        bytes.copy_from_slice(self);
    }
}

/// Declares a structure; see the [module](crate::on_disk_layout).
macro_rules! layout {
    (
        $(#[$meta:meta])*
        pub struct $name:ident[$bytes:literal] {
            $( $(#[$field_meta:meta])* $field:ident: $type:ty, )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $( $(#[$field_meta])* pub $field: $type, )*
        }

        impl $crate::on_disk_layout::Layout for $name {
            const NAME: &'static str = stringify!($name);
            const BYTES: usize = $bytes;
            const FIELDS: &'static [(&'static str, usize)] = &[
                $( (stringify!($field), <$type as $crate::on_disk_layout::FieldScalar>::WIDTH), )*
            ];

            #[inline]
            fn decode(bytes: &[u8]) -> Self {
                <Self as $crate::on_disk_layout::FieldScalar>::load(&bytes[..$bytes])
            }

            #[inline]
            fn encode(&self, bytes: &mut [u8]) {
                $crate::on_disk_layout::FieldScalar::store(self, &mut bytes[..$bytes]);
            }
        }

        impl $crate::on_disk_layout::FieldScalar for $name {
            const WIDTH: usize = $bytes;

            #[inline]
            fn load(bytes: &[u8]) -> Self {
                $(
                    let (field, bytes) =
                        bytes.split_at(<$type as $crate::on_disk_layout::FieldScalar>::WIDTH);
                    let $field = <$type as $crate::on_disk_layout::FieldScalar>::load(field);
                )*
                let _ = bytes;
                Self { $( $field, )* }
            }

            #[inline]
            fn store(&self, bytes: &mut [u8]) {
                $(
                    let (field, bytes) =
                        bytes.split_at_mut(<$type as $crate::on_disk_layout::FieldScalar>::WIDTH);
                    $crate::on_disk_layout::FieldScalar::store(&self.$field, field);
                )*
                let _ = bytes;
            }
        }

        const _: () = assert!(
            0 $( + <$type as $crate::on_disk_layout::FieldScalar>::WIDTH )* == $bytes,
            "the fields fill the structure"
        );
    };
}

pub(crate) use layout;

#[cfg(test)]
mod tests {
    #![allow(unreachable_pub, reason = "the macro serves public modules")]

    use super::Layout;

    layout! {
        /// Example structure.
        pub struct Inner[3] {
            /// One byte.
            small: u8,
            /// Two bytes.
            wide: u16,
        }
    }

    layout! {
        /// Structure that contains another.
        pub struct Outer[11] {
            /// The other one.
            inner: Inner,
            /// A number.
            number: u64,
        }
    }

    #[test]
    fn layout_fields_are_contiguous_and_little_endian() {
        let outer =
            Outer { inner: Inner { small: 1, wide: 0x0302 }, number: 0x0b0a_0908_0706_0504 };
        let mut bytes = [0xff; 12];
        outer.encode(&mut bytes);
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0xff]);
        assert_eq!(Outer::decode(&bytes), outer);
        assert_eq!(Outer::FIELDS, [("inner", 3), ("number", 8)]);
    }
}
