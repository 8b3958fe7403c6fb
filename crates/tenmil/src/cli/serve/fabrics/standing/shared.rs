//! Devices that a file names: each is opened once, whoever stands on it, and closed after the last.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use base::Medium;
use block::uri::Uri;
use block::{Existing, Handle, Kind, MediumError, Opened, Opener};

/// Those that are open.
#[derive(Default)]
pub(super) struct Shared(Mutex<Vec<Open>>);

struct Open {
    /// Its name, and what that stands for.
    uri: Uri,
    medium: Weak<dyn Medium>,
    description: String,
    existing: Vec<Existing>,
    handles: Vec<Handle>,
    identities: Vec<(Uri, String)>,
}

impl Kind for Shared {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        if let Some(open) = self.opened(uri) {
            return Ok(open);
        }
        // What it stands on may have a name as well, so nothing is locked meanwhile.
        let opened = opener.open(uri.only_child()?)?;
        let Opened { medium, description, existing, handles, identities } = opened.clone();
        let medium = Arc::downgrade(&medium);
        let uri = uri.clone();
        let open = Open { uri, medium, description, existing, handles, identities };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.medium.strong_count() > 0);
        all.push(open);
        Ok(opened)
    }
}

impl Shared {
    fn opened(&self, uri: &Uri) -> Option<Opened> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|open| open.uri == *uri).find_map(Open::again)
    }
}

impl Open {
    /// For one more, unless the last has gone.
    fn again(&self) -> Option<Opened> {
        let Self { description, existing, handles, identities, .. } = self;
        Some(Opened {
            medium: self.medium.upgrade()?,
            description: description.clone(),
            existing: existing.clone(),
            handles: handles.clone(),
            identities: identities.clone(),
        })
    }
}
