//! Integer decoding of payloads whose length was checked.

/// Sequential reader of a payload; past its end it returns zeroes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PayloadReader<'a>(pub(crate) &'a [u8]);

impl PayloadReader<'_> {
    fn take_array<const N: usize>(&mut self) -> [u8; N] {
        let Some((first, rest)) = self.0.split_first_chunk::<N>() else { return [0; N] };
        self.0 = rest;
        *first
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take_array())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take_array())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take_array())
    }
}
