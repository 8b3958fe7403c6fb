//! Controllers of other processes by name.
//!
//! ```text
//!   vfio-user:/run/disk.sock
//!   vfio-user:/run/disk.sock?ns=2&queues=4
//! ```

use std::path::PathBuf;

use block::uri::{Uri, UriError};

use crate::attached::Wanted;

/// What a `vfio-user:` URI says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VfuName {
    /// Where the other process listens.
    pub path: PathBuf,
    /// What is wanted of the controller there.
    pub wanted: Wanted,
}

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
        let wanted = Wanted::of(&mut fields)?;
        fields.finish()?;
        Ok(Self { path: uri.path().into(), wanted })
    }

    /// For people.
    pub(super) fn shown(&self) -> String {
        format!("{}:{}", Self::SCHEME, self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use super::{VfuName, Wanted};

    fn of(text: &str) -> Result<VfuName, String> {
        let uri = text.parse().map_err(|error: block::uri::UriError| error.to_string())?;
        VfuName::of(&uri).map_err(|error| error.to_string())
    }

    #[test]
    fn a_name_is_a_path_and_what_is_wanted_there() {
        let name = of("vfio-user:/run/disk.sock?ns=2&queues=4&depth=31").unwrap();
        assert_eq!(name.path.to_str(), Some("/run/disk.sock"));
        let Wanted { namespace, queues, depth, .. } = name.wanted;
        assert_eq!((namespace, queues, depth), (2, 4, 31));
        let usual = of("vfio-user:a").unwrap().wanted;
        assert_eq!((usual.namespace, usual.shadow_doorbells), (1, true));
        assert!(!of("vfio-user:a?shadow-doorbells=no").unwrap().wanted.shadow_doorbells);
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
