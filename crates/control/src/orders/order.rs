//! What can be ordered of a store and is done at once: the words of it, on the wire and in the program.

use block::uri::Uri;
use serde_json::{Map, Value, json};

use crate::arguments::Arguments;
use crate::kind::Kind;
use crate::method::{Need, Parameter};

/// What is ordered. A volume is named by its name in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// A volume is to be made.
    Create {
        /// Its name.
        name: String,
        /// How large it is.
        size_bytes: u64,
        /// In what pieces room is given to it.
        unit_bytes: u64,
        /// Whether its blocks have checksums.
        checksums: bool,
        /// Whether it is promised room for all of its blocks.
        thick: bool,
    },
    /// One is to be made over an image outside the store.
    CreateOver {
        /// Its name.
        name: String,
        /// The image.
        image: Uri,
        /// How large it is; like the image if nothing is said.
        size_bytes: Option<u64>,
        /// In what pieces room is given to it.
        unit_bytes: u64,
        /// Whether its blocks have checksums.
        checksums: bool,
    },
    /// A volume or a snapshot is to be deleted.
    Delete {
        /// Its name.
        name: String,
        /// Even if volumes were made from it.
        orphan: bool,
        /// Whether it is no error if there is none.
        if_exists: bool,
    },
    /// A volume is to have another name.
    Rename {
        /// Its name.
        name: String,
        /// The other one.
        to: String,
    },
    /// A volume is to have another size.
    Resize {
        /// Its name.
        name: String,
        /// The other one.
        size_bytes: u64,
        /// Whether it may be a smaller one.
        shrink: bool,
    },
    /// What a volume holds is to be kept.
    Snapshot {
        /// The volume.
        volume: String,
        /// What the snapshot is to be called.
        name: String,
    },
    /// A volume is to be made that holds what another one, or a snapshot, holds.
    Clone {
        /// The other one.
        from: String,
        /// What it is to be called.
        name: String,
    },
    /// A volume is to hold what it held when a snapshot of it was made.
    Revert {
        /// The volume.
        volume: String,
        /// The snapshot.
        snapshot: String,
    },
    /// A store is to have what its devices have gained.
    Grow {
        /// A device that it is to lie on, too.
        add: Option<Uri>,
        /// Even if that holds something.
        overwrite: bool,
    },
    /// A device of a store is found somewhere else from now on.
    Device {
        /// Its number.
        number: u32,
        /// Where it is.
        uri: Uri,
    },
    /// A store is to say that it fills at these parts of its room; zero for none.
    Thresholds {
        /// In per cent, the lower one first.
        percent: [u8; 2],
    },
}

/// Names and URIs; how long they may be is the store's to say.
const NAME: Kind = Kind::Text { len_max: 4096 };
const BYTES: Kind = Kind::Whole { min: 0, max: u64::MAX };
const PERCENT: Kind = Kind::Whole { min: 0, max: 100 };

pub(crate) const STORE: Parameter = Parameter {
    name: "store",
    kind: NAME,
    need: Need::Optional,
    help: "which: the device that it is on, its name or its UUID; need not be said of the only one",
};

/// Something that has to be named.
pub(crate) const fn named(name: &'static str, help: &'static str) -> Parameter {
    Parameter { name, kind: NAME, need: Need::Required, help }
}

/// A number of bytes.
pub(crate) const fn size(name: &'static str, need: Need, help: &'static str) -> Parameter {
    Parameter { name, kind: BYTES, need, help }
}

/// Something that is done only if it is said.
pub(crate) const fn flag(name: &'static str, help: &'static str) -> Parameter {
    Parameter { name, kind: Kind::Flag, need: Need::Default("no"), help }
}

/// A part of the room.
pub(crate) const fn percent(name: &'static str, need: Need, help: &'static str) -> Parameter {
    Parameter { name, kind: PERCENT, need, help }
}

impl Order {
    /// The same for somebody who stands elsewhere: files are named from the root.
    #[must_use]
    pub fn from_root(self) -> Self {
        match self {
            Self::CreateOver { name, image, size_bytes, unit_bytes, checksums } => {
                let image = image.from_root();
                Self::CreateOver { name, image, size_bytes, unit_bytes, checksums }
            }
            Self::Grow { add, overwrite } => Self::Grow { add: add.map(Uri::from_root), overwrite },
            Self::Device { number, uri } => Self::Device { number, uri: uri.from_root() },
            other => other,
        }
    }

    /// The method that it is given by, without the verb.
    pub const fn method(&self) -> &'static str {
        match self {
            Self::Create { .. } => "volume_create",
            Self::CreateOver { .. } => "volume_create_over",
            Self::Delete { .. } => "volume_delete",
            Self::Rename { .. } => "volume_rename",
            Self::Resize { .. } => "volume_resize",
            Self::Snapshot { .. } => "volume_snapshot",
            Self::Clone { .. } => "volume_clone",
            Self::Revert { .. } => "volume_revert",
            Self::Grow { .. } => "store_grow",
            Self::Device { .. } => "store_device",
            Self::Thresholds { .. } => "store_thresholds",
        }
    }

    /// The parameters that go with it, but for the store.
    pub fn parameters(&self) -> Map<String, Value> {
        let value = match self {
            Self::Create { name, size_bytes, unit_bytes, checksums, thick } => json!({
                "name": name, "size_bytes": size_bytes, "unit_bytes": unit_bytes,
                "checksums": checksums, "thick": thick,
            }),
            Self::CreateOver { name, image, size_bytes, unit_bytes, checksums } => {
                let mut value = json!({
                    "name": name, "image": image.to_string(), "unit_bytes": unit_bytes,
                    "checksums": checksums,
                });
                if let Some(size_bytes) = size_bytes {
                    value["size_bytes"] = (*size_bytes).into();
                }
                value
            }
            Self::Delete { name, orphan, if_exists } => {
                json!({ "name": name, "orphan": orphan, "if_exists": if_exists })
            }
            Self::Rename { name, to } => json!({ "name": name, "to": to }),
            Self::Resize { name, size_bytes, shrink } => {
                json!({ "name": name, "size_bytes": size_bytes, "shrink": shrink })
            }
            Self::Snapshot { volume, name } => json!({ "volume": volume, "name": name }),
            Self::Clone { from, name } => json!({ "from": from, "name": name }),
            Self::Revert { volume, snapshot } => json!({ "volume": volume, "snapshot": snapshot }),
            Self::Grow { add, overwrite } => {
                let mut value = json!({ "overwrite": overwrite });
                if let Some(add) = add {
                    value["add"] = add.to_string().into();
                }
                value
            }
            Self::Device { number, uri } => json!({ "number": number, "uri": uri.to_string() }),
            Self::Thresholds { percent: [first, second] } => {
                json!({ "first_percent": first, "second_percent": second })
            }
        };
        match value {
            Value::Object(parameters) => parameters,
            _ => Map::new(),
        }
    }

    /// Reads what was given to the method of this name.
    ///
    /// # Errors
    ///
    /// What is no name of a device.
    pub(crate) fn read(method: &str, arguments: &Arguments) -> Result<Self, String> {
        let text = |name| arguments.text(name).unwrap_or_default().to_owned();
        let whole = |name| arguments.whole(name).unwrap_or_default();
        let flag = |name| arguments.flag(name) == Some(true);
        let percent = |name| u8::try_from(whole(name)).unwrap_or(u8::MAX);
        let uri = |name| text(name).parse::<Uri>().map_err(|error| format!("{name} {error}"));
        let name = text("name");
        Ok(match method {
            "volume_create" => Self::Create {
                name,
                size_bytes: whole("size_bytes"),
                unit_bytes: whole("unit_bytes"),
                checksums: flag("checksums"),
                thick: flag("thick"),
            },
            "volume_create_over" => Self::CreateOver {
                name,
                image: uri("image")?,
                size_bytes: arguments.whole("size_bytes"),
                unit_bytes: whole("unit_bytes"),
                checksums: flag("checksums"),
            },
            "volume_delete" => {
                Self::Delete { name, orphan: flag("orphan"), if_exists: flag("if_exists") }
            }
            "volume_rename" => Self::Rename { name, to: text("to") },
            "volume_resize" => {
                Self::Resize { name, size_bytes: whole("size_bytes"), shrink: flag("shrink") }
            }
            "volume_snapshot" => Self::Snapshot { volume: text("volume"), name },
            "volume_clone" => Self::Clone { from: text("from"), name },
            "volume_revert" => Self::Revert { volume: text("volume"), snapshot: text("snapshot") },
            "store_grow" => Self::Grow {
                add: arguments.text("add").map(|_| uri("add")).transpose()?,
                overwrite: flag("overwrite"),
            },
            "store_device" => Self::Device {
                number: u32::try_from(whole("number")).unwrap_or(u32::MAX),
                uri: uri("uri")?,
            },
            "store_thresholds" => {
                Self::Thresholds { percent: [percent("first_percent"), percent("second_percent")] }
            }
            other => return Err(format!("no order is given by `{other}`")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Order;
    use crate::arguments::Arguments;
    use crate::methods::TABLE;

    #[test]
    fn a_file_that_is_named_to_somebody_else_is_named_from_the_root() {
        let uri = |text: &str| -> block::uri::Uri { text.parse().unwrap() };
        let here = std::env::current_dir().unwrap();
        let whole = format!("file:{}", here.join("more").display());
        let grow = Order::Grow { add: Some(uri("file:more")), overwrite: false }.from_root();
        assert_eq!(grow.parameters()["add"], whole);
        let device = Order::Device { number: 1, uri: uri("file:more") }.from_root();
        assert_eq!(device.parameters()["uri"], whole);
        let over = Order::CreateOver {
            name: "a".into(),
            image: uri("file:more"),
            size_bytes: None,
            unit_bytes: 4096,
            checksums: false,
        };
        assert_eq!(over.from_root().parameters()["image"], whole);
    }

    #[test]
    fn every_order_is_read_as_it_was_given() {
        let (name, to) = (String::from("a"), String::from("b"));
        let image: block::uri::Uri = "file:/srv/golden.img?block=512".parse().unwrap();
        let over = |size_bytes| Order::CreateOver {
            name: name.clone(),
            image: image.clone(),
            size_bytes,
            unit_bytes: 4096,
            checksums: true,
        };
        for order in [
            Order::Create {
                name: name.clone(),
                size_bytes: 1 << 40,
                unit_bytes: 8192,
                checksums: false,
                thick: true,
            },
            over(None),
            over(Some(8192)),
            Order::Delete { name: name.clone(), orphan: true, if_exists: true },
            Order::Rename { name: name.clone(), to: to.clone() },
            Order::Resize { name: name.clone(), size_bytes: 4096, shrink: true },
            Order::Snapshot { volume: name.clone(), name: to.clone() },
            Order::Clone { from: name.clone(), name: to.clone() },
            Order::Revert { volume: name.clone(), snapshot: to },
            Order::Grow { add: None, overwrite: false },
            Order::Grow { add: Some(image.clone()), overwrite: true },
            Order::Device { number: 3, uri: image.clone() },
            Order::Thresholds { percent: [70, 90] },
        ] {
            let wire = format!("set_{}", order.method());
            let method = TABLE.find(&wire).unwrap();
            let arguments = Arguments::check(method, &order.parameters()).unwrap();
            assert_eq!(Order::read(order.method(), &arguments), Ok(order));
        }
    }
}
