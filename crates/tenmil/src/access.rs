//! Access to a device: what the program, and everybody that it exports the device to, may do.

use std::fmt;

use tenmil_block::Claim;

/// Access that a program requests when it opens or attaches a device. Within a runtime, one device
/// may be open several times:
///
/// | requested \ open | `ReadOnly` | `ReadWrite` | `Exclusive` |
/// |---|---|---|---|
/// | `ReadOnly` | yes | yes | no |
/// | `ReadWrite` | yes | no | no |
/// | `Exclusive` | no | no | no |
///
/// Clones of a [`Device`](crate::Device), and exports of it, share one opening. Other processes are not
/// excluded, other than by the device itself (files and block devices are locked).
///
/// ```
/// use tenmil::{Access, Runtime};
///
/// # fn main() -> Result<(), tenmil::Error> {
/// let rt = Runtime::new()?;
/// rt.block_on(async {
///     let writer = rt.open("ram:16m", Access::ReadWrite).await?;
///     let reader = rt.open("ram:16m", Access::ReadOnly).await?;
///     assert!(rt.open("ram:16m", Access::ReadWrite).await.is_err());
///     let buf = writer.write(0, writer.buffer(512)?).await?;
///     assert!(reader.write(0, buf).await.is_err());
///     Ok(())
/// })
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read, beside other readers and one writer. Operations that change blocks are rejected.
    ReadOnly,
    /// Read and write, as the only writer.
    ReadWrite,
    /// Read and write; nothing else has the device open.
    Exclusive,
}

impl Access {
    /// Claim of the block layer.
    pub(crate) const fn to_claim(self) -> Claim {
        match self {
            Self::ReadOnly => Claim::ReadShared,
            Self::ReadWrite => Claim::WriteOnce,
            Self::Exclusive => Claim::Exclusive,
        }
    }

    pub(crate) const fn from_claim(claim: Claim) -> Self {
        match claim {
            Claim::ReadShared => Self::ReadOnly,
            Claim::WriteOnce => Self::ReadWrite,
            Claim::Exclusive => Self::Exclusive,
        }
    }

    /// Other openings that are compatible with it, for messages.
    pub(crate) const fn compatible_openings(self) -> &'static str {
        match self {
            Self::ReadOnly => "no exclusive opening",
            Self::ReadWrite => "read-only openings at most",
            Self::Exclusive => "no other opening",
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::ReadOnly => "read-only",
            Self::ReadWrite => "read-write",
            Self::Exclusive => "exclusive",
        })
    }
}
