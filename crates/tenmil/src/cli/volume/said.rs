//! What a command has to say of what it has done, to people and to programs.

use std::sync::Arc;

use block::store::{Info, OpenStore, PAGE_BYTES, Parent};
use serde_json::{Value, json};

use crate::Refused;

/// What came of a command.
pub(super) struct Said {
    open: Arc<OpenStore>,
    text: String,
    /// Whether it was done now; else it was so already.
    is_changed: bool,
    /// What the volume is called that it was about, if there still is one.
    name: Option<String>,
}

impl Said {
    /// It was done, or was so already.
    pub(super) fn new(open: &Arc<OpenStore>, is_changed: bool, text: String) -> Self {
        Self { open: Arc::clone(open), text, is_changed, name: None }
    }

    /// It is about the volume that has this name now.
    pub(super) fn of(self, name: &str) -> Self {
        Self { name: Some(name.to_owned()), ..self }
    }

    /// The same for people, or for programs.
    pub(super) fn render(self, is_json: bool) -> Result<String, Refused> {
        if !is_json {
            return Ok(self.text);
        }
        let volumes = self.open.list()?;
        let named = |name: &String| volumes.iter().find(|info| info.name == *name);
        let volume = match self.name.as_ref().and_then(named) {
            Some(info) => Some(described(info, &volumes, self.open.parent(info)?.as_ref())),
            None => None,
        };
        let document = json!({ "changed": self.is_changed, "volume": volume });
        Ok(format!("{document:#}\n"))
    }
}

/// What is known of a volume without reading its map.
pub(super) fn described(info: &Info, volumes: &[Info], parent: Option<&Parent>) -> Value {
    let page = u64::from(PAGE_BYTES);
    let parent = parent.map(|parent| {
        json!({
            "uri": parent.uri,
            "size_bytes": parent.blocks * page,
            "block_bytes": parent.block_bytes,
            "reach_bytes": info.reach * page,
        })
    });
    json!({
        "name": info.name,
        "number": info.id,
        "uuid": format!("{:032x}", info.uuid),
        "origin": origin(info, volumes),
        "read_only": info.is_read_only,
        "size_bytes": info.blocks * page,
        "used_bytes": info.mapped * page,
        "unit_bytes": info.unit * page,
        "checksums": info.has_checksums,
        "thick": info.is_thick,
        "parent": parent,
    })
}

/// The name of what a volume was made from, if that is there.
pub(super) fn origin<'a>(info: &Info, volumes: &'a [Info]) -> Option<&'a str> {
    volumes.iter().find(|one| one.id == info.origin).map(|one| &*one.name)
}
