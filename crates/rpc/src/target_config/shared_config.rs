//! Part of the configuration that all gateways of a group share: the subsystems with their namespaces and hosts.
//!
//! It is compared and stored as JSON with sorted keys. What differs between gateways is not part of it: the listeners
//! of a subsystem.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json};
use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, Value};

/// Shared part of the configuration of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedConfig {
    /// Tables of the subsystems, by NQN.
    subsystems: Vec<Map<String, Json>>,
}

/// Keys of a subsystem that differ between gateways.
const OWN_KEYS: [&str; 2] = ["listeners", "path"];
const NQN: &str = "nqn";
const NSID: &str = "nsid";
const NAMESPACE: &str = "namespace";
const SUBSYSTEM: &str = "subsystem";

impl SharedConfig {
    /// The shared part of a configuration. None if the text is no TOML.
    #[must_use]
    pub fn of_config(text: &str) -> Option<Self> {
        let document: Json = toml::from_str(text).ok()?;
        let tables = document.get(SUBSYSTEM).and_then(Json::as_array).into_iter().flatten();
        let mut subsystems: Vec<_> = tables.filter_map(Json::as_object).cloned().collect();
        subsystems.iter_mut().for_each(normalize);
        subsystems.sort_by_key(|table| text_of(table, NQN));
        Some(Self { subsystems })
    }

    /// The shared part of a store. None if it is of another program.
    #[must_use]
    pub fn of_record(record: &str) -> Option<Self> {
        Some(Self { subsystems: serde_json::from_str(record).ok()? })
    }

    /// The text that the store has.
    #[must_use]
    pub fn to_record(&self) -> String {
        serde_json::to_string(&self.subsystems).unwrap_or_default()
    }

    /// A configuration with this shared part in place of its own. Subsystems that are equal keep their text. None if the text
    /// is no TOML.
    #[must_use]
    pub fn apply_to(&self, text: &str) -> Option<String> {
        let before = Self::of_config(text)?;
        let mut document = text.parse::<DocumentMut>().ok()?;
        let tables = document.entry(SUBSYSTEM).or_insert(ArrayOfTables::new().into());
        let tables = tables.as_array_of_tables_mut()?;
        let nqn_of = |table: &Table| {
            let nqn = table.get(NQN).and_then(Item::as_str).unwrap_or_default();
            nqn.to_owned()
        };
        tables.retain(|table| self.find(&nqn_of(table)).is_some());
        for new in &self.subsystems {
            let nqn = text_of(new, NQN);
            let found = tables.iter_mut().find(|table| nqn_of(table) == nqn);
            match found {
                Some(_) if before.find(&nqn) == Some(new) => {}
                Some(table) => {
                    let mut changed = subsystem_table(new);
                    for key in OWN_KEYS {
                        if let Some(own) = table.get(key) {
                            changed.insert(key, own.clone());
                        }
                    }
                    changed.decor_mut().clone_from(table.decor());
                    *table = changed;
                }
                None => tables.push(subsystem_table(new)),
            }
        }
        Some(document.to_string())
    }

    /// What differs from the configuration of the group, one text for each key: object, what was found, what was expected.
    #[must_use]
    pub fn differences_from(&self, group: &Self) -> Vec<String> {
        let mut found = Vec::new();
        let all = self.subsystems.iter().chain(&group.subsystems).map(|table| text_of(table, NQN));
        let nqns: BTreeSet<String> = all.collect();
        for nqn in nqns {
            let name = format!("subsystem {nqn}");
            match (self.find(&nqn), group.find(&nqn)) {
                (Some(own), Some(expected)) => {
                    add_differences(&name, own, expected, &mut found);
                    add_namespaces(&nqn, own, expected, &mut found);
                }
                (Some(_), None) => found.push(format!("{name} is not in the group")),
                (None, _) => found.push(format!("{name} is missing, expected as in the group")),
            }
        }
        found
    }

    fn find(&self, nqn: &str) -> Option<&Map<String, Json>> {
        self.subsystems.iter().find(|table| text_of(table, NQN) == nqn)
    }
}

/// Removes what is not shared, and writes out what the configuration may leave out.
fn normalize(subsystem: &mut Map<String, Json>) {
    for key in OWN_KEYS {
        subsystem.remove(key);
    }
    let Some(namespaces) = subsystem.get_mut(NAMESPACE).and_then(Json::as_array_mut) else {
        return;
    };
    for (at, namespace) in namespaces.iter_mut().enumerate() {
        let Some(table) = namespace.as_object_mut() else { continue };
        table.entry(NSID).or_insert_with(|| (at as u64 + 1).into());
        table.entry("ana-group").or_insert_with(|| 1.into());
        if table.get("read-only") == Some(&Json::Bool(false)) {
            table.remove("read-only");
        }
    }
    namespaces.sort_by_key(|namespace| namespace[NSID].as_u64());
}

fn add_namespaces(
    nqn: &str,
    own: &Map<String, Json>,
    expected: &Map<String, Json>,
    found: &mut Vec<String>,
) {
    let namespaces = |table: &Map<String, Json>| {
        let all = table.get(NAMESPACE).and_then(Json::as_array).cloned().unwrap_or_default();
        let numbered = all.into_iter().filter_map(|one| Some((one[NSID].as_u64()?, one)));
        numbered.collect::<BTreeMap<u64, Json>>()
    };
    let (own, expected) = (namespaces(own), namespaces(expected));
    let nsids: BTreeSet<&u64> = own.keys().chain(expected.keys()).collect();
    for nsid in nsids {
        let name = format!("namespace {nsid} of {nqn}");
        match (
            own.get(nsid).and_then(Json::as_object),
            expected.get(nsid).and_then(Json::as_object),
        ) {
            (Some(own), Some(expected)) => add_differences(&name, own, expected, found),
            (Some(own), None) => {
                found.push(format!("{name} ({}) is not in the group", text_of(own, "uri")));
            }
            (None, Some(expected)) => {
                let uri = text_of(expected, "uri");
                found.push(format!("{name} is missing, expected {uri} as in the group"));
            }
            (None, None) => {}
        }
    }
}

/// Differences of two tables in the keys of their own.
fn add_differences(
    name: &str,
    own: &Map<String, Json>,
    expected: &Map<String, Json>,
    found: &mut Vec<String>,
) {
    let keys: BTreeSet<&String> = own.keys().chain(expected.keys()).collect();
    let shown = |value: Option<&Json>| value.map_or_else(|| "absent".to_owned(), Json::to_string);
    for key in keys.into_iter().filter(|key| *key != NAMESPACE) {
        let (own, expected) = (own.get(key), expected.get(key));
        if own != expected {
            found.push(format!(
                "{name}: `{key}` is {}, expected {} as in the group",
                shown(own),
                shown(expected)
            ));
        }
    }
}

fn text_of(table: &Map<String, Json>, key: &str) -> String {
    table.get(key).and_then(Json::as_str).unwrap_or_default().to_owned()
}

fn subsystem_table(subsystem: &Map<String, Json>) -> Table {
    let mut table = Table::new();
    // The name stands first.
    let keys = subsystem.iter().filter(|(key, _)| *key == NQN);
    for (key, value) in keys.chain(subsystem.iter().filter(|(key, _)| *key != NQN)) {
        match value.as_array().filter(|_| key == NAMESPACE) {
            Some(namespaces) => {
                let mut tables = ArrayOfTables::new();
                for namespace in namespaces.iter().filter_map(Json::as_object) {
                    let mut one = Table::new();
                    for (key, value) in namespace {
                        one.extend([(key, value_of(value))]);
                    }
                    tables.push(one);
                }
                table.insert(key, tables.into());
            }
            None => table.extend([(key, value_of(value))]),
        }
    }
    table
}

fn value_of(value: &Json) -> Value {
    match value {
        Json::Null => Value::from(""),
        Json::Bool(is) => (*is).into(),
        Json::Number(number) => match number.as_i64() {
            Some(number) => number.into(),
            None => number.as_f64().unwrap_or_default().into(),
        },
        Json::String(text) => text.as_str().into(),
        Json::Array(values) => values.iter().map(value_of).collect::<Array>().into(),
        Json::Object(table) => {
            let keys = table.iter().map(|(key, value)| (key.as_str(), value_of(value)));
            keys.collect::<InlineTable>().into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SharedConfig;
    use crate::target_config::TargetConfig;

    const FILE: &str = "\
# Of gateway a.
[[listener]]
address = '127.0.0.1:4420'

# The disks.
[[subsystem]]
nqn = 'nqn.2026-01.org.example:a'
listeners = ['127.0.0.1:4420']
allowed-hosts = ['nqn.2026-01.org.example:h', { nqn = 'nqn.2026-01.org.example:i', connections = 4 }]

[[subsystem.namespace]]
uri = 'file:/one?size=1m' # the first
[[subsystem.namespace]]
uri = 'file:/two?size=1m'
nsid = 2
ana-group = 2
";

    fn shared(text: &str) -> SharedConfig {
        SharedConfig::of_config(text).unwrap()
    }

    #[test]
    fn spelling_and_listeners_are_not_shared() {
        let other = FILE.replace("'127.0.0.1:4420'", "'127.0.0.1:4421'").replace(
            "uri = 'file:/one?size=1m' # the first",
            "uri='file:/one?size=1m'\nnsid=1\nread-only=false",
        );
        assert_eq!(shared(FILE), shared(&other));
        assert_eq!(SharedConfig::of_record(&shared(FILE).to_record()), Some(shared(FILE)));
    }

    #[test]
    fn change_of_another_gateway_keeps_listeners_and_comments_elsewhere() {
        let changed = FILE.replace("/two", "/three").replace("connections = 4", "connections = 5");
        let changed =
            changed + "[[subsystem]]\nnqn = 'nqn.2026-01.org.example:b'\nallow-any-host = true\n";
        let own = FILE.replace("4420", "4421");
        let text = shared(&changed).apply_to(&own).unwrap();
        assert_eq!(shared(&text), shared(&changed), "{text}");
        assert!(text.contains("listeners = ['127.0.0.1:4421']"), "{text}");
        assert!(text.starts_with("# Of gateway a.\n") && text.contains("# The disks."), "{text}");
        let config = TargetConfig::parse(&text).unwrap();
        assert_eq!(config.subsystems[0].namespaces[1].uri.path(), "/three");
        let back = shared(FILE).apply_to(&text).unwrap();
        assert_eq!(TargetConfig::parse(&back), TargetConfig::parse(&own), "{back}");
        assert_eq!(shared(FILE).apply_to(FILE).unwrap(), FILE, "what is equal stays as it is");
    }

    #[test]
    fn differences_name_the_object_what_was_found_and_what_was_expected() {
        let nqn = "nqn.2026-01.org.example:a";
        assert_eq!(shared(FILE).differences_from(&shared(FILE)), [""; 0]);
        for (from, to, expected) in [
            (
                "ana-group = 2",
                "ana-group = 3",
                format!("namespace 2 of {nqn}: `ana-group` is 2, expected 3 as in the group"),
            ),
            (
                "file:/one?size=1m",
                "file:/1",
                format!(
                    "namespace 1 of {nqn}: `uri` is \"file:/one?size=1m\", expected \"file:/1\" as in the group"
                ),
            ),
            (
                "nsid = 2",
                "nsid = 7",
                format!("namespace 2 of {nqn} (file:/two?size=1m) is not in the group"),
            ),
            (
                "allowed-hosts",
                "serial = 'S'\nallowed-hosts",
                format!("subsystem {nqn}: `serial` is absent, expected \"S\" as in the group"),
            ),
        ] {
            let group = FILE.replacen(from, to, 1);
            let found = shared(FILE).differences_from(&shared(&group));
            assert_eq!(found[0], expected);
        }
        let found = shared(FILE).differences_from(&shared(""));
        assert_eq!(found, [format!("subsystem {nqn} is not in the group")]);
        let found = shared("").differences_from(&shared(FILE));
        assert_eq!(found, [format!("subsystem {nqn} is missing, expected as in the group")]);
    }
}
