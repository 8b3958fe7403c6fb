//! First and last bytes of a device, with accessors for the fields of signatures.

/// Bytes examined at each edge of a device. The backup labels of ZFS reach farthest inside.
pub const END_BYTES: usize = 512 << 10;

/// The first and the last bytes of a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceEdges<'a> {
    /// The first [`END_BYTES`] bytes, or the whole device.
    pub head: &'a [u8],
    /// The last [`END_BYTES`] bytes, or the whole device.
    pub tail: &'a [u8],
    /// Size of the device.
    pub size_bytes: u64,
}

impl<'a> DeviceEdges<'a> {
    /// `len` bytes at `offset`, if they were read.
    pub(super) fn bytes_at(&self, offset: u64, len: usize) -> Option<&'a [u8]> {
        let in_tail = || {
            let before = self.size_bytes.checked_sub(self.tail.len() as u64)?;
            bytes_at(self.tail, offset.checked_sub(before)?, len)
        };
        bytes_at(self.head, offset, len).or_else(in_tail)
    }

    /// Whether `magic` is at `offset`.
    pub(super) fn has_bytes_at(&self, offset: u64, magic: &[u8]) -> bool {
        self.bytes_at(offset, magic.len()) == Some(magic)
    }

    /// `N` bytes at `offset`.
    pub(super) fn array_at<const N: usize>(&self, offset: u64) -> Option<[u8; N]> {
        self.bytes_at(offset, N)?.try_into().ok()
    }

    /// The little-endian 16-bit integer at `offset`.
    pub(super) fn le16_at(&self, offset: u64) -> Option<u16> {
        self.array_at(offset).map(u16::from_le_bytes)
    }

    /// The little-endian 32-bit integer at `offset`.
    pub(super) fn le32_at(&self, offset: u64) -> Option<u32> {
        self.array_at(offset).map(u32::from_le_bytes)
    }

    /// The little-endian 64-bit integer at `offset`.
    pub(super) fn le64_at(&self, offset: u64) -> Option<u64> {
        self.array_at(offset).map(u64::from_le_bytes)
    }

    /// The big-endian 32-bit integer at `offset`.
    pub(super) fn be32_at(&self, offset: u64) -> Option<u32> {
        self.array_at(offset).map(u32::from_be_bytes)
    }

    /// The text in a field of `len` bytes, up to its first NUL and trimmed; `None` if it is empty.
    pub(super) fn text_at(&self, offset: u64, len: usize) -> Option<String> {
        let bytes = self.bytes_at(offset, len)?;
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(len);
        replace_control_characters(&String::from_utf8_lossy(&bytes[..end]))
    }

    /// The text in a field of `len` bytes of 16-bit characters.
    pub(super) fn utf16_at(&self, offset: u64, len: usize) -> Option<String> {
        let words = self.bytes_at(offset, len)?.chunks_exact(2);
        let words = words.map(|two| u16::from_le_bytes([two[0], two[1]]));
        let words: Vec<u16> = words.take_while(|word| *word != 0).collect();
        replace_control_characters(&String::from_utf16_lossy(&words))
    }

    /// The UUID at `offset`, its bytes in text order; `None` if it is zero.
    pub(super) fn uuid_at(&self, offset: u64) -> Option<String> {
        let bytes: [u8; 16] = self.array_at(offset)?;
        (bytes != [0; 16]).then(|| crate::Uuid(bytes).to_string())
    }

    /// The UUID at `offset` with its first three fields little-endian, as in UEFI.
    pub(super) fn guid_at(&self, offset: u64) -> Option<String> {
        let mut bytes: [u8; 16] = self.array_at(offset)?;
        bytes[..4].reverse();
        bytes[4..6].reverse();
        bytes[6..8].reverse();
        (bytes != [0; 16]).then(|| crate::Uuid(bytes).to_string())
    }
}

/// The `len` bytes at `offset`, if `bytes` has them.
fn bytes_at(bytes: &[u8], offset: u64, len: usize) -> Option<&[u8]> {
    let offset = usize::try_from(offset).ok()?;
    bytes.get(offset..offset.checked_add(len)?)
}

/// Removes characters from an untrusted name that must not reach a terminal.
fn replace_control_characters(text: &str) -> Option<String> {
    let text: String = text
        .trim()
        .chars()
        .map(|c| if tenmil_base::text::is_terminal_control(c) { '?' } else { c })
        .collect();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::DeviceEdges;

    #[test]
    fn device_edges_have_bytes_at_both_ends_only() {
        let (head, tail) = ([1_u8, 2, 3, 4], [7_u8, 8, 9]);
        let ends = DeviceEdges { head: &head, tail: &tail, size_bytes: 10 };
        assert_eq!(ends.bytes_at(1, 3), Some(&head[1..]));
        assert_eq!(ends.bytes_at(2, 3), None, "it begins in one and ends in neither");
        assert_eq!(ends.bytes_at(7, 3), Some(&tail[..]));
        assert_eq!(ends.bytes_at(6, 1), None);
        assert_eq!((ends.bytes_at(8, 3), ends.bytes_at(u64::MAX, 1)), (None, None));
        let short = DeviceEdges { head: &head, tail: &head, size_bytes: 4 };
        assert_eq!(short.le32_at(0), Some(0x0403_0201));
    }

    #[test]
    fn labels_are_truncated_and_escaped() {
        let bytes = b" a\x1b[2Jb \0rest\0\0";
        let ends = DeviceEdges { head: bytes, tail: &[], size_bytes: 16 };
        assert_eq!(ends.text_at(0, 14).as_deref(), Some("a?[2Jb"));
        assert_eq!(ends.text_at(13, 2), None);
        assert_eq!(ends.utf16_at(0, 3), Some("\u{6120}".into()));
    }
}
