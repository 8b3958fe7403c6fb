//! Controllers of other processes by name.
//!
//! ```text
//!   vfio-user:/run/disk.sock
//!   vfio-user:/run/disk.sock?ns=2&queues=4
//! ```

use std::path::PathBuf;

use base::Span;
use block::uri::{Uri, UriError};

/// What a `vfio-user:` URI says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VfuName {
    /// Where the other process listens.
    pub path: PathBuf,
    /// The namespace.
    pub namespace: u32,
    /// Commands in flight on each queue.
    pub depth: u32,
    /// I/O queues that the controller is asked for.
    pub queues: u16,
    /// How long it may take to answer: a message, or all that it takes to be ready.
    pub patience: Span,
}

const DEPTH: u64 = 127;
const DEPTH_MAX: u64 = 4095;
const QUEUES: u64 = 16;
const QUEUES_MAX: u64 = 1024;
const PATIENCE: Span = Span::from_secs(5);

impl VfuName {
    /// What stands before the colon.
    pub const SCHEME: &str = "vfio-user";

    /// What `uri` says, whose scheme is [`SCHEME`](Self::SCHEME).
    ///
    /// # Errors
    ///
    /// If it names no socket.
    pub fn of(uri: &Uri) -> Result<Self, UriError> {
        if uri.path().is_empty() {
            let problem = "no socket, expected vfio-user:PATH, such as vfio-user:/run/disk.sock";
            return Err(uri.refuse(problem));
        }
        let mut fields = uri.fields();
        let small = |number: u64| u32::try_from(number).unwrap_or(1);
        let namespace = fields.number("ns", 1..=u64::from(u32::MAX - 1))?.unwrap_or(1);
        let depth = fields.number("depth", 1..=DEPTH_MAX)?.unwrap_or(DEPTH);
        let queues = fields.number("queues", 1..=QUEUES_MAX)?.unwrap_or(QUEUES);
        let patience = fields.time("patience")?.unwrap_or(PATIENCE);
        fields.finish()?;
        Ok(Self {
            path: uri.path().into(),
            namespace: small(namespace),
            depth: small(depth),
            queues: u16::try_from(queues).unwrap_or(1),
            patience,
        })
    }

    /// For people.
    pub(super) fn shown(&self) -> String {
        format!("{}:{}", Self::SCHEME, self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use super::VfuName;

    fn of(text: &str) -> Result<VfuName, String> {
        let uri = text.parse().map_err(|error: block::uri::UriError| error.to_string())?;
        VfuName::of(&uri).map_err(|error| error.to_string())
    }

    #[test]
    fn a_name_is_a_path_and_what_is_wanted_there() {
        let name = of("vfio-user:/run/disk.sock?ns=2&queues=4&depth=31").unwrap();
        assert_eq!(name.path.to_str(), Some("/run/disk.sock"));
        assert_eq!((name.namespace, name.queues, name.depth), (2, 4, 31));
        assert_eq!(of("vfio-user:a").unwrap().namespace, 1);
    }

    #[test]
    fn what_names_no_socket_is_refused() {
        for text in ["vfio-user:", "vfio-user:/x?ns=0", "vfio-user:/x?depth=0", "vfio-user:/x?no=1"]
        {
            let refused = of(text).unwrap_err();
            assert!(refused.contains("expected"), "{text}: {refused}");
        }
    }
}
