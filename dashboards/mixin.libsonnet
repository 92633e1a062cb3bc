// streampool as a monitoring mixin: dashboards, rules and alerts as the committed files have them. Alerts get a `runbook_url`
// from their `runbook`, under the place where you keep this project.
//
//   (import 'streampool/dashboards/mixin.libsonnet') + { _config+:: { runbookBase: 'https://git.example.com/streampool/' } }
{
  _config+:: {
    runbookBase: '',
  },
  grafanaDashboards+:: {
    'streampool-overview.json': import 'grafana/streampool-overview.json',
    'streampool-leaks.json': import 'grafana/streampool-leaks.json',
    'streampool-fleet.json': import 'grafana/streampool-fleet.json',
  },
  local rules = std.parseYaml(importstr 'rules/streampool.rules.yml'),
  local withRunbook(rule) =
    if std.objectHas(rule, 'annotations')
    then rule { annotations+: { runbook_url: $._config.runbookBase + rule.annotations.runbook } }
    else rule,
  local groups(key) = [
    group { rules: [withRunbook(rule) for rule in group.rules] }
    for group in rules.groups
    if std.objectHas(group.rules[0], key)
  ],
  prometheusRules+:: { groups+: groups('record') },
  prometheusAlerts+:: { groups+: groups('alert') },
}
