//! Tar archive of regular files (POSIX ustar), in memory.
//!
//! ```text
//!   0      100    108    116    124    136    148    156      157        257      263
//!   | name | mode | uid  | gid  | size | time | sum  | type 0 | linkname | ustar\0 | 00 | … 512
//!   | content, padded to 512 | next header … | two zero blocks
//! ```

use tenmil_base::UtcTime;

/// Archive that is being written.
pub(super) struct TarArchive {
    bytes: Vec<u8>,
    names: Vec<String>,
    unix_s: u64,
}

const BLOCK_BYTES: usize = 512;
/// Longest name.
const NAME_MAX: usize = 100;
/// Directory of all files.
const ROOT: &str = "tenmil-support/";

impl TarArchive {
    /// Creates an archive whose files have this time.
    pub(super) fn new(time: UtcTime) -> Self {
        Self { bytes: Vec::new(), names: Vec::new(), unix_s: time.unix_us / 1_000_000 }
    }

    /// Names of the files so far.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Adds a file. A name that is too long loses its end.
    pub(super) fn add_file(&mut self, name: &str, content: &[u8]) {
        let path: String = format!("{ROOT}{name}").chars().take(NAME_MAX).collect();
        let mut header = [0; BLOCK_BYTES];
        let mut put =
            |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        // All names are ASCII.
        put(0, &path);
        put(100, "0000600\0");
        put(108, "0000000\0");
        put(116, "0000000\0");
        put(124, &format!("{:011o}\0", content.len()));
        put(136, &format!("{:011o}\0", self.unix_s));
        // The sum counts its own field as spaces.
        put(148, "        ");
        put(156, "0");
        put(257, "ustar\0");
        put(263, "00");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend_from_slice(&header);
        self.bytes.extend_from_slice(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        self.names.push(name.to_owned());
    }

    /// The whole archive.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 2 * BLOCK_BYTES, 0);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::UtcTime;

    use super::TarArchive;

    #[test]
    fn archive_is_made_of_blocks_with_correct_sums() {
        let mut archive = TarArchive::new(UtcTime { unix_us: 1_709_210_096_000_000 });
        archive.add_file("manifest.txt", b"hello");
        archive.add_file(&"x".repeat(200), &[7; 513]);
        assert_eq!(archive.names()[0], "manifest.txt");
        let bytes = archive.finish();
        assert_eq!(bytes.len(), (2 + 3 + 2) * 512);
        assert!(bytes.starts_with(b"tenmil-support/manifest.txt\0"));
        assert_eq!(&bytes[124..136], b"00000000005\0");
        for at in [0, 1024] {
            let header = &bytes[at..at + 512];
            let sum = header.iter().enumerate();
            let sum: u32 = sum
                .map(|(at, byte)| if (148..156).contains(&at) { 32 } else { u32::from(*byte) })
                .sum();
            let stored = std::str::from_utf8(&header[148..154]).unwrap();
            assert_eq!(u32::from_str_radix(stored, 8).unwrap(), sum);
        }
        assert_eq!(&bytes[512..517], b"hello");
        assert!(bytes[bytes.len() - 1024..].iter().all(|byte| *byte == 0));
    }
}
