//! `vfio-user:` URIs.
//!
//! ```text
//!   vfio-user:/run/disk.sock
//!   vfio-user:/run/disk.sock?ns=2&queues=4
//! ```

use std::path::PathBuf;

use tenmil_block::uri::{Uri, UriError};

use crate::attached_controller::AttachOptions;

/// Parsed `vfio-user:` URI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VfioUserUri {
    /// Path of the listening socket.
    pub path: PathBuf,
    /// Options for attaching the controller.
    pub wanted: AttachOptions,
}

impl VfioUserUri {
    /// URI scheme.
    pub const SCHEME: &str = crate::VFIO_USER_SCHEME;

    /// Parses `uri`, whose scheme must be [`SCHEME`](Self::SCHEME).
    ///
    /// # Errors
    ///
    /// If the path is empty, or an option is invalid.
    pub fn from_uri(uri: &Uri) -> Result<Self, UriError> {
        if uri.path().is_empty() {
            let problem = "no socket, expected vfio-user:PATH, such as vfio-user:/run/disk.sock";
            return Err(uri.error(problem));
        }
        let mut fields = uri.options();
        let wanted = AttachOptions::from_uri_options(&mut fields)?;
        fields.reject_unconsumed()?;
        Ok(Self { path: uri.path().into(), wanted })
    }

    /// URI without options, for messages.
    pub(super) fn without_options(&self) -> String {
        format!("{}:{}", Self::SCHEME, self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use super::{AttachOptions, VfioUserUri};

    fn parse_name(text: &str) -> Result<VfioUserUri, tenmil_base::Error> {
        let uri = text
            .parse()
            .map_err(|error: tenmil_block::uri::UriError| error.to_string())
            .map_err(tenmil_base::Error::environment)?;
        VfioUserUri::from_uri(&uri).map_err(tenmil_base::Error::environment)
    }

    #[test]
    fn uri_consists_of_socket_path_and_options() {
        let name = parse_name("vfio-user:/run/disk.sock?ns=2&queues=4&depth=31").unwrap();
        assert_eq!(name.path.to_str(), Some("/run/disk.sock"));
        let AttachOptions { namespace, queues, depth, .. } = name.wanted;
        assert_eq!((namespace, queues, depth), (2, 4, 31));
        let usual = parse_name("vfio-user:a").unwrap().wanted;
        assert_eq!((usual.namespace, usual.shadow_doorbells), (1, true));
        assert!(!parse_name("vfio-user:a?shadow-doorbells=no").unwrap().wanted.shadow_doorbells);
    }

    #[test]
    fn uri_without_a_socket_is_rejected() {
        for text in ["vfio-user:", "vfio-user:/x?ns=0", "vfio-user:/x?depth=0", "vfio-user:/x?no=1"]
        {
            let refused = parse_name(text).unwrap_err();
            assert!(refused.text.contains("expected"), "{text}: {refused}");
        }
    }
}
