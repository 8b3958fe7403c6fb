//! Expressions of the dashboard and of the alert rules, as they are run.

use serde_json::Value;

/// A query, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Expression {
    /// Title of the panel or name of the alert.
    pub(super) title: String,
    pub(super) text: String,
}

/// Expressions of all panels, with variables that select everything.
pub(super) fn panel_expressions(dashboard: &Value) -> Vec<Expression> {
    let mut found = Vec::new();
    for panel in dashboard["panels"].as_array().into_iter().flatten() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let title = panel["title"].as_str().unwrap_or_default().to_owned();
            let text = target["expr"].as_str().unwrap_or_default();
            let text = text.replace("$__rate_interval", "20s").replace("$job", ".*");
            let text = text.replace("$instance", ".*").replace("$export", ".*");
            found.push(Expression { title, text });
        }
    }
    found
}

/// Expressions of all rules: the values of `expr:`, on one line or folded over several (`>-`).
pub(super) fn rule_expressions(rules: &str) -> Vec<Expression> {
    let mut found = Vec::<Expression>::new();
    let mut title = String::new();
    let mut lines = rules.lines().peekable();
    let indent = |line: &str| line.len() - line.trim_start().len();
    while let Some(line) = lines.next() {
        let trimmed = line.trim();
        if let Some(name) = trimmed.strip_prefix("- alert: ") {
            name.clone_into(&mut title);
        }
        let Some(text) = trimmed.strip_prefix("expr: ") else { continue };
        let mut text = text.to_owned();
        if text == ">-" {
            text.clear();
            while let Some(next) = lines.next_if(|next| indent(next) > indent(line)) {
                text = format!("{text} {}", next.trim()).trim().to_owned();
            }
        }
        found.push(Expression { title: title.clone(), text });
    }
    found
}

/// The expression with results instead of filters, so that it has data whether or not its condition is
/// true: `a < 1` becomes `a < bool 1`. Comparisons stand between spaces; the operators of label matchers do
/// not.
pub(super) fn without_filters(text: &str) -> String {
    let words = text.split(' ').map(|word| match word {
        "<" | ">" | "==" | "!=" | "<=" | ">=" => format!("{word} bool"),
        other => other.to_owned(),
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Expression, panel_expressions, rule_expressions, without_filters};

    fn expression(title: &str, text: &str) -> Expression {
        Expression { title: title.into(), text: text.into() }
    }

    #[test]
    fn expressions_of_rules_are_found_on_one_line_and_on_several() {
        let rules = "groups:\n  - name: g\n    rules:\n      - alert: A\n        expr: x{a=\"b\"} == 1\n        \
                     for: 1m\n      - alert: B\n        expr: >-\n          rate(y[5m])\n          < 0.1\n        \
                     labels:\n          severity: warning\n";
        let found = rule_expressions(rules);
        assert_eq!(
            found,
            [expression("A", "x{a=\"b\"} == 1"), expression("B", "rate(y[5m]) < 0.1")]
        );
        assert_eq!(without_filters(&found[0].text), "x{a=\"b\"} == bool 1");
        assert_eq!(without_filters(&found[1].text), "rate(y[5m]) < bool 0.1");
    }

    #[test]
    fn variables_of_panels_select_everything() {
        let target =
            json!({ "expr": "rate(x{job=~\"$job\",export=~\"$export\"}[$__rate_interval])" });
        let dashboard =
            json!({ "panels": [{ "title": "P", "targets": [target] }, { "title": "row" }] });
        let expected = "rate(x{job=~\".*\",export=~\".*\"}[20s])";
        assert_eq!(panel_expressions(&dashboard), [expression("P", expected)]);
    }

    #[test]
    fn shipped_files_have_expressions_and_name_only_metrics_that_are_documented() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
        let read = |path: &str| std::fs::read_to_string(format!("{root}{path}")).unwrap();
        let dashboard = serde_json::from_str(&read("packaging/grafana/tenmil.json")).unwrap();
        let mut all = panel_expressions(&dashboard);
        all.extend(rule_expressions(&read("packaging/prometheus/tenmil-alerts.yml")));
        assert!(all.len() > 40, "{}", all.len());
        let page = read("docs/operator/metrics.md");
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        for Expression { title, text } in all {
            assert!(!text.is_empty() && !text.contains('$'), "{title}: {text}");
            for name in text.split(|c| !is_part(c)).filter(|word| word.starts_with("tenmil_")) {
                let base = name.strip_suffix("_bucket").unwrap_or(name);
                assert!(page.contains(&format!("| `{base}` |")), "{title}: {name}");
            }
        }
    }
}
