//! Integer encoding of messages. The protocol uses the byte order of the machine (Protocol
//! Specification), and all supported machines are little-endian.

/// Sequential reader of a message body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyReader<'a>(pub(crate) &'a [u8]);

impl<'a> BodyReader<'a> {
    fn take_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.take_array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take_array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take_array().map(u64::from_le_bytes)
    }

    /// Remaining bytes.
    pub(crate) fn remaining(self) -> &'a [u8] {
        self.0
    }
}

/// Sequential writer of a message body.
#[derive(Debug, Default)]
pub(crate) struct BodyWriter(pub(crate) Vec<u8>);

impl BodyWriter {
    pub(crate) fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn slice(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}
