//! Commands on a pool that are executed at once: their parameters on the wire and in the program.

use serde_json::{Map, Value, json};
use tenmil_block::uri::Uri;

use crate::arguments::Arguments;
use crate::method::{ParamDefault, Parameter};
use crate::param_type::ParamType;

/// Pool command. Volumes are identified by their name in the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolCommand {
    /// Create a volume.
    Create {
        /// Name.
        name: String,
        /// Size in bytes.
        size_bytes: u64,
        /// Cluster size in bytes.
        unit_bytes: u64,
        /// Whether blocks have checksums.
        checksums: bool,
        /// Whether space for all blocks is reserved.
        thick: bool,
    },
    /// Create a volume backed by an image outside the pool.
    CreateOver {
        /// Name.
        name: String,
        /// Image.
        image: Uri,
        /// Size in bytes; by default that of the image.
        size_bytes: Option<u64>,
        /// Cluster size in bytes.
        unit_bytes: u64,
        /// Whether blocks have checksums.
        checksums: bool,
    },
    /// Delete a volume or snapshot.
    Delete {
        /// Name.
        name: String,
        /// Whether to delete a snapshot that has clones.
        orphan: bool,
        /// Whether a missing volume is not an error.
        if_exists: bool,
    },
    /// Rename a volume.
    Rename {
        /// Current name.
        name: String,
        /// New name.
        to: String,
    },
    /// Resize a volume.
    Resize {
        /// Name.
        name: String,
        /// New size in bytes.
        size_bytes: u64,
        /// Whether the volume may shrink.
        shrink: bool,
    },
    /// Create a snapshot.
    Snapshot {
        /// Volume.
        volume: String,
        /// Name of the snapshot.
        name: String,
    },
    /// Create snapshots of several volumes at one point in time.
    Snapshots {
        /// Volumes, each with the name of its snapshot.
        pairs: Vec<(String, String)>,
    },
    /// Clone a volume or snapshot.
    Clone {
        /// Source.
        from: String,
        /// Name of the clone.
        name: String,
    },
    /// Roll a volume back to a snapshot.
    Rollback {
        /// Volume.
        volume: String,
        /// Snapshot.
        snapshot: String,
    },
    /// Grow a pool.
    Grow {
        /// Devices to add; without one, the pool grows with its devices.
        add: Vec<Uri>,
        /// Whether the added devices may contain data, which are lost.
        overwrite: bool,
    },
    /// Record a new location of a device.
    Device {
        /// Device number.
        number: u32,
        /// New location.
        uri: Uri,
    },
    /// Set the warning thresholds of a pool.
    Thresholds {
        /// Thresholds in percent of the capacity, the lower one first; 0 disables one.
        percent: [u8; 2],
    },
}

/// Names and URIs; the pool checks their length.
const NAME: ParamType = ParamType::Text { len_max: 4096 };
const BYTES: ParamType = ParamType::Whole { min: 0, max: u64::MAX };
const PERCENT: ParamType = ParamType::Whole { min: 0, max: 100 };

pub(crate) const STORE: Parameter = Parameter {
    name: "pool",
    kind: NAME,
    need: ParamDefault::Optional,
    help: "the pool: its device, name or UUID; optional if only one is open",
};

/// Required name parameter.
pub(crate) const fn name_parameter(name: &'static str, help: &'static str) -> Parameter {
    Parameter { name, kind: NAME, need: ParamDefault::Required, help }
}

/// Byte count parameter.
pub(crate) const fn size_parameter(
    name: &'static str,
    need: ParamDefault,
    help: &'static str,
) -> Parameter {
    Parameter { name, kind: BYTES, need, help }
}

/// Boolean parameter, false by default.
pub(crate) const fn boolean_parameter(name: &'static str, help: &'static str) -> Parameter {
    Parameter { name, kind: ParamType::Flag, need: ParamDefault::Default("no"), help }
}

/// Percentage parameter.
pub(crate) const fn percent_parameter(
    name: &'static str,
    need: ParamDefault,
    help: &'static str,
) -> Parameter {
    Parameter { name, kind: PERCENT, need, help }
}

impl PoolCommand {
    /// Makes file names absolute, for execution by a process with another working directory.
    #[must_use]
    pub fn with_absolute_paths(self) -> Self {
        match self {
            Self::CreateOver { name, image, size_bytes, unit_bytes, checksums } => {
                let image = image.with_absolute_paths();
                Self::CreateOver { name, image, size_bytes, unit_bytes, checksums }
            }
            Self::Grow { add, overwrite } => Self::Grow {
                add: add.into_iter().map(Uri::with_absolute_paths).collect(),
                overwrite,
            },
            Self::Device { number, uri } => Self::Device { number, uri: uri.with_absolute_paths() },
            other => other,
        }
    }

    /// Method name without the verb.
    pub const fn method_name(&self) -> &'static str {
        match self {
            Self::Create { .. } => "volume_create",
            Self::CreateOver { .. } => "volume_create_from",
            Self::Delete { .. } => "volume_delete",
            Self::Rename { .. } => "volume_rename",
            Self::Resize { .. } => "volume_resize",
            Self::Snapshot { .. } => "volume_snapshot",
            Self::Snapshots { .. } => "volume_snapshots",
            Self::Clone { .. } => "volume_clone",
            Self::Rollback { .. } => "volume_rollback",
            Self::Grow { .. } => "pool_grow",
            Self::Device { .. } => "pool_device",
            Self::Thresholds { .. } => "pool_thresholds",
        }
    }

    /// Request parameters, without the pool.
    pub fn request_parameters(&self) -> Map<String, Value> {
        let value = match self {
            Self::Create { name, size_bytes, unit_bytes, checksums, thick } => json!({
                "name": name, "size_bytes": size_bytes, "cluster_bytes": unit_bytes,
                "checksums": checksums, "thick": thick,
            }),
            Self::CreateOver { name, image, size_bytes, unit_bytes, checksums } => {
                let mut value = json!({
                    "name": name, "image": image.to_string(), "cluster_bytes": unit_bytes,
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
            Self::Snapshots { pairs } => {
                let (volumes, names): (Vec<_>, Vec<_>) = pairs.iter().cloned().unzip();
                json!({ "volumes": volumes, "names": names })
            }
            Self::Clone { from, name } => json!({ "from": from, "name": name }),
            Self::Rollback { volume, snapshot } => {
                json!({ "volume": volume, "snapshot": snapshot })
            }
            Self::Grow { add, overwrite } => {
                let mut value = json!({ "overwrite": overwrite });
                if !add.is_empty() {
                    value["add"] = add.iter().map(Uri::to_string).collect();
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

    /// Builds the command from the arguments of the method.
    ///
    /// # Errors
    ///
    /// A malformed device URI, or lists of different lengths.
    pub(crate) fn from_arguments(method: &str, arguments: &Arguments) -> Result<Self, String> {
        let text = |name| arguments.text(name).unwrap_or_default().to_owned();
        let whole = |name| arguments.integer(name).unwrap_or_default();
        let flag = |name| arguments.boolean(name) == Some(true);
        let percent = |name| u8::try_from(whole(name)).unwrap_or(u8::MAX);
        let parse =
            |name, text: &str| text.parse::<Uri>().map_err(|error| format!("{name} {error}"));
        let uri = |name| parse(name, &text(name));
        let uris = |name| -> Result<Vec<Uri>, String> {
            arguments.texts(name).iter().map(|text| parse(name, text)).collect()
        };
        let name = text("name");
        Ok(match method {
            "volume_create" => Self::Create {
                name,
                size_bytes: whole("size_bytes"),
                unit_bytes: whole("cluster_bytes"),
                checksums: flag("checksums"),
                thick: flag("thick"),
            },
            "volume_create_from" => Self::CreateOver {
                name,
                image: uri("image")?,
                size_bytes: arguments.integer("size_bytes"),
                unit_bytes: whole("cluster_bytes"),
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
            "volume_snapshots" => {
                let (volumes, names) = (arguments.texts("volumes"), arguments.texts("names"));
                if volumes.len() != names.len() {
                    let (found, expected) = (names.len(), volumes.len());
                    return Err(format!("{found} names, expected {expected}, one for each volume"));
                }
                let pairs = volumes.iter().cloned().zip(names.iter().cloned());
                Self::Snapshots { pairs: pairs.collect() }
            }
            "volume_clone" => Self::Clone { from: text("from"), name },
            "volume_rollback" => {
                Self::Rollback { volume: text("volume"), snapshot: text("snapshot") }
            }
            "pool_grow" => Self::Grow { add: uris("add")?, overwrite: flag("overwrite") },
            "pool_device" => Self::Device {
                number: u32::try_from(whole("number")).unwrap_or(u32::MAX),
                uri: uri("uri")?,
            },
            "pool_thresholds" => {
                Self::Thresholds { percent: [percent("first_percent"), percent("second_percent")] }
            }
            other => return Err(format!("no order is given by `{other}`")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::PoolCommand;
    use crate::arguments::Arguments;
    use crate::methods::TABLE;

    #[test]
    fn file_names_are_made_absolute_for_another_process() {
        let uri = |text: &str| -> tenmil_block::uri::Uri { text.parse().unwrap() };
        let here = std::env::current_dir().unwrap();
        let whole = format!("file:{}", here.join("more").display());
        let grow = PoolCommand::Grow { add: vec![uri("file:more")], overwrite: false }
            .with_absolute_paths();
        assert_eq!(grow.request_parameters()["add"], serde_json::json!([whole]));
        let device = PoolCommand::Device { number: 1, uri: uri("file:more") }.with_absolute_paths();
        assert_eq!(device.request_parameters()["uri"], whole);
        let over = PoolCommand::CreateOver {
            name: "a".into(),
            image: uri("file:more"),
            size_bytes: None,
            unit_bytes: 4096,
            checksums: false,
        };
        assert_eq!(over.with_absolute_paths().request_parameters()["image"], whole);
    }

    #[test]
    fn every_command_is_read_back_from_its_request() {
        let (name, to) = (String::from("a"), String::from("b"));
        let image: tenmil_block::uri::Uri = "file:/srv/golden.img?block=512".parse().unwrap();
        let over = |size_bytes| PoolCommand::CreateOver {
            name: name.clone(),
            image: image.clone(),
            size_bytes,
            unit_bytes: 4096,
            checksums: true,
        };
        for order in [
            PoolCommand::Create {
                name: name.clone(),
                size_bytes: 1 << 40,
                unit_bytes: 8192,
                checksums: false,
                thick: true,
            },
            over(None),
            over(Some(8192)),
            PoolCommand::Delete { name: name.clone(), orphan: true, if_exists: true },
            PoolCommand::Rename { name: name.clone(), to: to.clone() },
            PoolCommand::Resize { name: name.clone(), size_bytes: 4096, shrink: true },
            PoolCommand::Snapshot { volume: name.clone(), name: to.clone() },
            PoolCommand::Snapshots { pairs: vec![(name.clone(), to.clone())] },
            PoolCommand::Snapshots {
                pairs: vec![(name.clone(), "c".into()), (to.clone(), "d".into())],
            },
            PoolCommand::Clone { from: name.clone(), name: to.clone() },
            PoolCommand::Rollback { volume: name.clone(), snapshot: to },
            PoolCommand::Grow { add: vec![], overwrite: false },
            PoolCommand::Grow { add: vec![image.clone(), image.clone()], overwrite: true },
            PoolCommand::Device { number: 3, uri: image.clone() },
            PoolCommand::Thresholds { percent: [70, 90] },
        ] {
            let wire = format!("set_{}", order.method_name());
            let method = TABLE.find(&wire).unwrap();
            let arguments = Arguments::validate(method, &order.request_parameters()).unwrap();
            assert_eq!(PoolCommand::from_arguments(order.method_name(), &arguments), Ok(order));
        }
    }
}
