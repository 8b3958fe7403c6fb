//! Writer for an initramfs: a "newc" cpio archive (kernel documentation,
//! driver-api/early-userspace/buffer-format.rst).
//!
//! ```text
//!   "070701" · 13 fields of 8 hexadecimal digits · name and NUL, to 4 bytes · bytes, to 4 bytes
//! ```

use std::collections::BTreeSet;
use std::io::{self, Write};

/// Archive writer, which creates parent directories as needed.
pub(crate) struct CpioArchive<W> {
    out: W,
    at: usize,
    inode: u32,
    directories: BTreeSet<String>,
}

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

impl<W: Write> CpioArchive<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, at: 0, inode: 0, directories: BTreeSet::new() }
    }

    /// Adds an empty directory, unless it exists already.
    pub(crate) fn add_directory(&mut self, path: &str) -> io::Result<()> {
        let path = path.trim_matches('/');
        if path.is_empty() || !self.directories.insert(path.to_owned()) {
            return Ok(());
        }
        self.add_parents(path)?;
        self.write_entry(path, DIRECTORY, &[])
    }

    /// Adds a readable and executable file.
    pub(crate) fn add_file(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        self.add_parents(path)?;
        self.write_entry(path, PROGRAM, bytes)
    }

    /// Adds a symbolic link.
    pub(crate) fn add_symlink(&mut self, path: &str, to: &str) -> io::Result<()> {
        self.add_parents(path)?;
        self.write_entry(path, LINK, to.as_bytes())
    }

    /// Ends the archive; returns its size in bytes.
    pub(crate) fn finish(mut self) -> io::Result<usize> {
        self.write_entry("TRAILER!!!", 0, &[])?;
        self.out.flush()?;
        Ok(self.at)
    }

    fn add_parents(&mut self, path: &str) -> io::Result<()> {
        match path.trim_matches('/').rsplit_once('/') {
            Some((parent, _)) => self.add_directory(parent),
            None => Ok(()),
        }
    }

    fn write_entry(&mut self, path: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        let path = path.trim_matches('/');
        self.inode += 1;
        let links = if mode == DIRECTORY { 2 } else { 1 };
        let len = u32::try_from(bytes.len()).map_err(|_| path_too_long_error(path))?;
        let name_len = u32::try_from(path.len() + 1).map_err(|_| path_too_long_error(path))?;
        let fields = [self.inode, mode, 0, 0, links, 0, len, 0, 0, 0, 0, name_len, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.write_bytes(header.as_bytes())?;
        self.write_bytes(path.as_bytes())?;
        self.write_bytes(&[0])?;
        self.write_padding()?;
        self.write_bytes(bytes)?;
        self.write_padding()
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.at += bytes.len();
        self.out.write_all(bytes)
    }

    fn write_padding(&mut self) -> io::Result<()> {
        let missing = self.at.next_multiple_of(4) - self.at;
        self.write_bytes(&[0; 4][..missing])
    }
}

fn path_too_long_error(path: &str) -> io::Error {
    io::Error::other(format!("{path}: too long for an archive"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_precede_their_contents_and_are_added_once() {
        let mut bytes = Vec::new();
        let mut archive = CpioArchive::new(&mut bytes);
        archive.add_file("/a/b/c", b"12345").unwrap();
        archive.add_file("a/b/d", b"").unwrap();
        archive.add_symlink("a/e", "b/c").unwrap();
        let len = archive.finish().unwrap();
        assert_eq!(len, bytes.len());
        assert_eq!(len % 4, 0);
        let names: Vec<_> = parse_cpio_entries(&bytes).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a", "a/b", "a/b/c", "a/b/d", "a/e", "TRAILER!!!"]);
        assert_eq!(parse_cpio_entries(&bytes)[2].1, b"12345");
        assert_eq!(parse_cpio_entries(&bytes)[4].1, b"b/c");
    }

    fn parse_cpio_entries(mut bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            assert_eq!(&bytes[..6], b"070701");
            let field = |index: usize| {
                let digits = core::str::from_utf8(&bytes[6 + 8 * index..][..8]).unwrap();
                usize::from_str_radix(digits, 16).unwrap()
            };
            let (len, name_len) = (field(6), field(11));
            let name = &bytes[110..110 + name_len - 1];
            let data = (110 + name_len).next_multiple_of(4);
            found.push((
                String::from_utf8(name.to_vec()).unwrap(),
                bytes[data..data + len].to_vec(),
            ));
            bytes = &bytes[(data + len).next_multiple_of(4)..];
        }
        found
    }
}
