//! FUSE kernel protocol, as far as one directory of files needs it (linux/fuse.h, version 7.31):
//! requests read from `/dev/fuse` and replies written to it. Numbers are in host byte order.

/// Node number of the only directory.
pub(crate) const ROOT: u64 = 1;
/// Minor version of the supported protocol.
const MINOR: u32 = 31;
/// Maximum number of bytes per write.
pub(crate) const WRITE_BYTES_MAX: usize = 1 << 20;
/// Size of `fuse_in_header`.
const IN_HEADER_BYTES: usize = 40;
/// `FUSE_ASYNC_READ`, `FUSE_BIG_WRITES`, `FUSE_ASYNC_DIO` and `FUSE_MAX_PAGES`.
const INIT_FLAGS: u32 = 1 | 1 << 5 | 1 << 15 | 1 << 22;
/// `FOPEN_DIRECT_IO` and `FOPEN_PARALLEL_DIRECT_WRITES`: the kernel caches no data.
const OPEN_FLAGS: u32 = 1 | 1 << 6;
const FATTR_SIZE: u32 = 1 << 3;
const O_DSYNC: u32 = 0o10_000;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;
const FALLOC_FL_PUNCH_HOLE: u32 = 2;
const FALLOC_FL_ZERO_RANGE: u32 = 0x10;

/// Error numbers of Linux (errno(3)).
pub(crate) mod errno {
    pub(crate) const NOENT: i32 = 2;
    pub(crate) const IO: i32 = 5;
    pub(crate) const NXIO: i32 = 6;
    pub(crate) const INVAL: i32 = 22;
    pub(crate) const NOSYS: i32 = 38;
    pub(crate) const OPNOTSUPP: i32 = 95;
}

/// Operation of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FuseOperation {
    Init {
        minor: u32,
    },
    Lookup {
        name: String,
    },
    Attributes,
    SetLen {
        len: u64,
    },
    /// Any other attribute.
    SetOther,
    Create {
        name: String,
    },
    Unlink {
        name: String,
    },
    Open,
    OpenDirectory,
    List {
        offset: u64,
    },
    Read {
        offset: u64,
        len: usize,
    },
    Write {
        offset: u64,
        forced: bool,
        at: usize,
        len: usize,
    },
    Zero {
        offset: u64,
        len: u64,
    },
    Grow {
        len: u64,
    },
    Sync,
    SyncDirectory,
    Seek {
        offset: u64,
        data: bool,
    },
    Statistics,
    Close,
    /// Requests without a reply.
    Note,
    Unknown,
}

/// FUSE request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FuseRequest {
    pub(crate) unique: u64,
    pub(crate) node: u64,
    /// File handle from the reply to the open.
    pub(crate) handle: u64,
    pub(crate) operation: FuseOperation,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|part| part.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|part| part.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

fn name_at(bytes: &[u8], at: usize) -> String {
    let rest = bytes.get(at..).unwrap_or_default();
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len());
    String::from_utf8_lossy(&rest[..end]).into_owned()
}

impl FuseRequest {
    /// Parses the bytes of one read from `/dev/fuse`.
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let body = bytes.get(IN_HEADER_BYTES..).unwrap_or_default();
        let (first, second) = (u64_at(body, 0), u64_at(body, 8));
        let size = u32_at(body, 16) as usize;
        let mut handle = first;
        let operation = match u32_at(bytes, 4) {
            1 => FuseOperation::Lookup { name: name_at(body, 0) },
            2 | 36 | 42 => FuseOperation::Note,
            3 => FuseOperation::Attributes,
            4 if u32_at(body, 0) & FATTR_SIZE != 0 => {
                FuseOperation::SetLen { len: u64_at(body, 16) }
            }
            4 => FuseOperation::SetOther,
            10 => FuseOperation::Unlink { name: name_at(body, 0) },
            14 => FuseOperation::Open,
            15 => FuseOperation::Read { offset: second, len: size },
            16 => {
                let forced = u32_at(body, 32) & O_DSYNC != 0;
                FuseOperation::Write { offset: second, forced, at: IN_HEADER_BYTES + 40, len: size }
            }
            17 => FuseOperation::Statistics,
            18 | 29 => FuseOperation::Close,
            20 => FuseOperation::Sync,
            26 => FuseOperation::Init { minor: u32_at(body, 4) },
            27 => FuseOperation::OpenDirectory,
            28 => FuseOperation::List { offset: second },
            30 => FuseOperation::SyncDirectory,
            35 => {
                handle = 0;
                FuseOperation::Create { name: name_at(body, 16) }
            }
            43 => {
                let mode = u32_at(body, 24);
                if mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE) != 0 {
                    FuseOperation::Zero { offset: second, len: u64_at(body, 16) }
                } else if mode == 0 {
                    FuseOperation::Grow { len: second + u64_at(body, 16) }
                } else {
                    FuseOperation::Unknown
                }
            }
            46 if matches!(u32_at(body, 16), SEEK_DATA | SEEK_HOLE) => {
                FuseOperation::Seek { offset: second, data: u32_at(body, 16) == SEEK_DATA }
            }
            _ => FuseOperation::Unknown,
        };
        Self { unique: u64_at(bytes, 8), node: u64_at(bytes, 16), handle, operation }
    }
}

/// Size of a file.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FileSize {
    pub(crate) len: u64,
    pub(crate) allocated_bytes: u64,
}

/// Reply under construction.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FuseReply(Vec<u8>);

impl FuseReply {
    fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn zeroes(mut self, count: usize) -> Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }

    /// `fuse_attr`.
    fn push_attributes(self, node: u64, file: Option<FileSize>) -> Self {
        let (mode, len, allocated) = match file {
            Some(FileSize { len, allocated_bytes }) => (0o100_600, len, allocated_bytes),
            None => (0o040_755, 0, 0),
        };
        let times = self.u64(node).u64(len).u64(allocated / 512).zeroes(24 + 12);
        // Mode, links, user, group, device, block size, flags.
        times.u32(mode).u32(1).zeroes(12).u32(4096).u32(0)
    }

    pub(crate) fn empty() -> Self {
        Self::default()
    }

    /// `fuse_init_out`.
    pub(crate) fn init_result(minor: u32) -> Self {
        let write_max = u32::try_from(WRITE_BYTES_MAX).unwrap_or(u32::MAX);
        let limits = Self::default().u32(7).u32(minor.min(MINOR)).u32(0).u32(INIT_FLAGS);
        let limits = limits.u16(64).u16(48).u32(write_max).u32(1);
        // Maximum number of pages per request.
        limits.u16(256).zeroes(2 + 32)
    }

    /// `fuse_entry_out` with cache timeouts of zero.
    pub(crate) fn entry_result(node: u64, file: Option<FileSize>) -> Self {
        Self::default().u64(node).u64(0).zeroes(24).push_attributes(node, file)
    }

    /// `fuse_attr_out`.
    pub(crate) fn attributes_result(node: u64, file: Option<FileSize>) -> Self {
        Self::default().zeroes(16).push_attributes(node, file)
    }

    /// `fuse_open_out`.
    pub(crate) fn open_result(handle: u64) -> Self {
        Self::default().u64(handle).u32(OPEN_FLAGS).u32(0)
    }

    pub(crate) fn opendir_result(handle: u64) -> Self {
        Self::default().u64(handle).u64(0)
    }

    /// `fuse_entry_out` and `fuse_open_out`.
    pub(crate) fn create_result(node: u64, file: Option<FileSize>, handle: u64) -> Self {
        Self::entry_result(node, file).u64(handle).u32(OPEN_FLAGS).u32(0)
    }

    /// `fuse_dirent` for each name after the first `offset`.
    pub(crate) fn directory_entries<'a>(
        names: impl Iterator<Item = (&'a String, u64)>,
        offset: u64,
    ) -> Self {
        let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
        let mut answer = Self::default();
        for (index, (name, node)) in names.enumerate().skip(skipped) {
            let len = u32::try_from(name.len()).unwrap_or(0);
            // A regular file (DT_REG).
            answer = answer.u64(node).u64(index as u64 + 1).u32(len).u32(8);
            answer.0.extend(name.as_bytes());
            answer = answer.zeroes(name.len().next_multiple_of(8) - name.len());
        }
        answer
    }

    pub(crate) fn data_bytes(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// `fuse_write_out`.
    pub(crate) fn write_result(len: usize) -> Self {
        Self::default().u32(u32::try_from(len).unwrap_or(0)).u32(0)
    }

    /// `fuse_lseek_out`.
    pub(crate) fn seek_result(offset: u64) -> Self {
        Self::default().u64(offset)
    }

    /// `fuse_kstatfs`: 4 GiB, all free.
    pub(crate) fn statfs_result() -> Self {
        let counts = Self::default().u64(1 << 20).u64(1 << 20).u64(1 << 20).u64(64).u64(64);
        counts.u32(4096).u32(120).u32(4096).zeroes(28)
    }

    /// The reply with its `fuse_out_header`.
    pub(crate) fn into_bytes(answer: Result<Self, i32>, unique: u64) -> Vec<u8> {
        let (error, body) = match answer {
            Ok(body) => (0, body.0),
            Err(errno) => (-errno, Vec::new()),
        };
        let len = u32::try_from(16 + body.len()).unwrap_or(0);
        let mut bytes = Self::default().u32(len).0;
        bytes.extend(error.to_ne_bytes());
        bytes.extend(unique.to_ne_bytes());
        bytes.extend(body);
        bytes
    }
}

/// Whether the node is the directory.
pub(crate) fn is_root_node(node: u64) -> bool {
    node == ROOT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_have_the_sizes_of_the_kernel_structures() {
        let file = FileSize::default();
        assert_eq!(FuseReply::init_result(40).0.len(), 64);
        assert_eq!(FuseReply::entry_result(2, Some(file)).0.len(), 128);
        assert_eq!(FuseReply::attributes_result(2, Some(file)).0.len(), 104);
        assert_eq!(FuseReply::create_result(2, Some(file), 0).0.len(), 144);
        assert_eq!(FuseReply::open_result(0).0.len(), 16);
        assert_eq!(FuseReply::statfs_result().0.len(), 80);
        assert_eq!(FuseReply::into_bytes(Err(errno::IO), 7).len(), 16);
        assert_eq!(
            FuseReply::into_bytes(Ok(FuseReply::write_result(5)), 7)[16..20],
            5_u32.to_ne_bytes()
        );
    }

    #[test]
    fn synchronous_write_is_distinguished() {
        let mut bytes = vec![0; IN_HEADER_BYTES + 40 + 512];
        bytes[4..8].copy_from_slice(&16_u32.to_ne_bytes());
        bytes[16..24].copy_from_slice(&2_u64.to_ne_bytes());
        bytes[IN_HEADER_BYTES + 8..IN_HEADER_BYTES + 16].copy_from_slice(&4096_u64.to_ne_bytes());
        bytes[IN_HEADER_BYTES + 16..IN_HEADER_BYTES + 20].copy_from_slice(&512_u32.to_ne_bytes());
        let write = |forced| FuseOperation::Write { offset: 4096, forced, at: 80, len: 512 };
        assert_eq!(FuseRequest::parse(&bytes).operation, write(false));
        bytes[IN_HEADER_BYTES + 32..IN_HEADER_BYTES + 36].copy_from_slice(&O_DSYNC.to_ne_bytes());
        assert_eq!(FuseRequest::parse(&bytes).operation, write(true));
    }

    #[test]
    fn truncated_request_is_parsed_without_panic() {
        for opcode in 0_u32..64 {
            let mut bytes = [0; 40];
            bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
            for len in 0..bytes.len() {
                FuseRequest::parse(&bytes[..len]);
            }
        }
    }
}
